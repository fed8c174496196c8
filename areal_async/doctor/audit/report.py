"""What an examination comes to: a verdict per promise, and the counts behind it. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec


class PromiseVerdict(StrEnum):
    """What the evidence says of a promise."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNDECIDED = "not decidable"


class ViolationKind(StrEnum):
    """How a promise is broken."""

    LOST = "lost"
    TWICE = "twice"
    DISAGREES = "records disagree"
    OVER_AGE = "over age"
    NOT_WHOLE = "not whole"
    UNVERSIONED = "unversioned"
    HOLE = "hole"
    OUT_OF_TURN = "out of turn"
    ATTEMPTS = "attempts"
    NO_LETTER = "no dead letter"
    DAMAGED = "damaged"

    def of(self, id: str, text: str) -> "Violation":
        """Return one of this kind, as ``Violation`` has it."""
        return Violation(self, id, text)


class Violation(msgspec.Struct, frozen=True):
    """One thing that breaks a promise."""

    kind: ViolationKind
    id: str
    """Name of the trajectory, slot, group or step."""
    text: str


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """One promise, judged."""

    promise: str
    """``P1``."""
    title: str
    verdict: PromiseVerdict
    sentence: str
    """Figures of what was looked at."""
    num_findings: int
    findings: list[Violation]
    missing: list[str]
    """Parts of the evidence that a proof lacks."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A whole examination."""

    run: str
    is_live: bool
    is_finished: bool
    checkpoint: str
    """Version of the newest checkpoint; empty before the first."""
    groups: dict[str, int]
    slots: dict[str, int]
    notes: list[str]
    """Sentences that a reader should know and no promise speaks of."""
    rulings: list[Ruling]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is refuted."""
        return all(ruling.verdict is not PromiseVerdict.REFUTED for ruling in self.rulings)

    def as_json(self) -> Mapping[str, Any]:
        """Return it as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": 1, **plain, "is_clean": self.is_clean}


def rule(
    promise: str, title: str, sentence: str, *, findings: Sequence[Violation], missing: Sequence[str] = ()
) -> Ruling:
    """Judge: one finding refutes; without any, one thing that is missing leaves it open."""
    verdict = PromiseVerdict.REFUTED if findings else PromiseVerdict.UNDECIDED if missing else PromiseVerdict.PROVED
    return Ruling(
        promise=promise,
        title=title,
        verdict=verdict,
        sentence=sentence,
        num_findings=len(findings),
        findings=list(findings),
        missing=list(missing),
    )


def num_ids(rulings: Sequence[Ruling], *kinds: ViolationKind) -> dict[str, int]:
    """Count the ids with findings of these kinds, by kind."""
    ids = {kind: {one.id for ruling in rulings for one in ruling.findings if one.kind is kind} for kind in kinds}
    return {kind.value: len(found) for kind, found in ids.items()}
