"""The fate of every group and of every slot, from the evidence alone. Pure.

A group's fate is looked for in every place that could record it (outcome, ledger, cut), a slot's in its group's
fate, in the archive and among what is still stored. Whatever has none of these is lost.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from areal_async.controller.accounts import RUN_ENDED, Accounts
from areal_async.doctor.audit.run_record import ArchivedSlot, RunRecord
from areal_async.protocol.fields import is_version
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind, CutSlot, Outcome, OutcomeKind, Version

TRAINED = OutcomeKind.TRAINED.value
IN_TRAINING = "in a cut that no checkpoint holds"
OPEN = "open"


class SlotFate(StrEnum):
    """What became of one trajectory, where its group's fate does not say it."""

    TRAINED = "trained"
    UNUSED = "unused sibling of a trained group"
    STORED = "still stored"
    LOST = "lost"


class Fate(NamedTuple):
    """What became of one trajectory: a ``SlotFate``, or its group's fate."""

    group_id: str
    sibling: int
    kind: str
    reason: str = ""
    """Cause of its loss."""


class WholeJournal(Journal):
    """Every surviving cut with its slots, and every outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, Outcome] = {}
        """The first settling one of each group."""

    def add_outcome(self, outcome: Outcome) -> bool:
        settles = super().add_outcome(outcome)
        if settles:
            self.outcomes[outcome.group_id] = outcome
        return settles

    def close_cuts(self) -> None:
        """Let go of nothing."""


class Reconciliation:
    """Everything that several promises ask for."""

    def __init__(self, evidence: RunRecord) -> None:
        self.evidence = evidence
        """Without what was trained in steps that were given up since, until a restored trainer moves it away."""
        self.journal = WholeJournal()
        self.accounts = Accounts(max_groups_in_flight=evidence.rules.max_groups_in_flight)
        self.ended: set[str] = set()
        """Groups that the run's end found unsettled, and after which it has not gone on."""
        self._read_log()
        self.evidence = replace(
            evidence,
            archive=[slot for slot in evidence.archive if self.journal.survives(Version(slot.lineage, slot.step))],
            metrics=[line for line in evidence.metrics if self.journal.survives(_version_of(line))],
        )
        ledger = evidence.ledger
        self.checkpoint_step = self.journal.last_shared_step(Version.parse(ledger.version)) if ledger else 0
        trained = ledger.trained.items() if ledger else ()
        self.ledger = {int(step): groups for step, groups in trained if int(step) <= self.checkpoint_step}
        """Groups that the newest checkpoint was trained on, by step."""
        self.steps: dict[int, list[ArchivedSlot]] = {}
        """Archive by step."""
        for slot in sorted(self.evidence.archive, key=lambda one: (one.step, one.lineage, one.position)):
            self.steps.setdefault(slot.step, []).append(slot)
        self.stored = {slot.sample_uid: slot for slot in evidence.stored}
        self.received = {
            slot.sample_uid: (receipt.group_id, slot.sibling)
            for produced in evidence.produced.values()
            for receipt in produced.receipts
            for slot in receipt.slots
        }
        """Sample uid -> group and sibling, as the producers' receipts say."""
        self.cut_steps = {
            group.group_id: step for step, cut in sorted(self.journal.cuts.items()) for group in cut.groups
        }
        """Group -> the surviving step that cut it."""
        self.groups = self._group_fates()
        """Fate of every group that anything speaks of."""
        self.fates = self._slot_fates()
        """Fate of every trajectory that is known to have been stored, by sample uid."""

    def _read_log(self) -> None:
        for entry in self.evidence.log:
            if isinstance(entry, Cut):
                self.journal.add_cut(entry, sequence=0)
                self.accounts.add_cut(entry, sequence=0)
                if entry.kind is CutKind.BEGIN:
                    self.ended.clear()
            else:
                if self.journal.add_outcome(entry) and entry.reason == RUN_ENDED:
                    self.ended.add(entry.group_id)
                self.accounts.add_outcome(entry)

    def cut_slots(self, step: int) -> dict[tuple[str, str], CutSlot]:
        """Return the slots of a surviving cut, by group and sample uid."""
        cut = self.journal.cuts.get(step)
        groups = cut.groups if cut else []
        return {(group.group_id, item.slot.sample_uid): item for group in groups for item in group.slots}

    def num_groups_by_fate(self) -> dict[str, int]:
        """Count the groups; the open ones by how much of them is stored."""
        num_stored = Counter(slot.group_id for slot in self.stored.values())
        states = {
            group_id: fate
            if fate != OPEN
            else _how_open(num_stored[group_id], self.evidence.rules.of(group_id).group_size)
            for group_id, fate in self.groups.items()
        }
        return dict(Counter(states.values()).most_common())

    def unarchived(self) -> list[str]:
        """Say what the archive lacks. A checkpoint waits for it; what was trained since may come yet, or never."""
        missing = [f"the archive of step {step}" for step in sorted(self.ledger.keys() - self.steps.keys())]
        missing += self.evidence.unreadable_files
        return missing if self.ledger or self.steps else [*missing, "nothing is trained yet"]

    def _group_fates(self) -> dict[str, str]:
        evidence = self.evidence
        known = evidence.tickets | {slot.group_id for slot in evidence.stored}
        known |= {group_id for group_id, _ in self.received.values()}
        known |= {group.group_id for one in evidence.log if isinstance(one, Cut) for group in one.groups}
        fates = dict.fromkeys(known, OPEN)
        fates |= {
            group_id: TRAINED if step <= self.checkpoint_step else IN_TRAINING
            for group_id, step in self.cut_steps.items()
        }
        fates |= {group_id: outcome.kind.value for group_id, outcome in self.journal.outcomes.items()}
        return fates | {group_id: TRAINED for trained in self.ledger.values() for group_id in trained}

    def _slot_fates(self) -> dict[str, Fate]:
        """Judge whatever receipts, cuts or the stream itself say was stored."""
        in_cut = _cut_slots(self.evidence.log)
        slots = _cut_slots(self.evidence.log[: self.evidence.num_entries_before_messages])
        slots |= {slot.sample_uid: (slot.group_id, slot.sibling) for slot in self.evidence.stored} | self.received
        archived = {slot.sample_uid for slot in self.evidence.archive}
        fates = {
            uid: self._fate(uid, group_id, sibling, is_in_cut=uid in in_cut, is_archived=uid in archived)
            for uid, (group_id, sibling) in slots.items()
        }
        for outcome in self.evidence.log:
            if isinstance(outcome, Outcome) and not outcome.kind.settles and outcome.sample_uid in fates:
                fates[outcome.sample_uid] = fates[outcome.sample_uid]._replace(kind=outcome.kind.value, reason="")
        return fates

    def _fate(self, uid: str, group_id: str, sibling: int, *, is_in_cut: bool, is_archived: bool) -> Fate:
        fate = self.groups.get(group_id, OPEN)
        if fate == TRAINED:
            step = self.cut_steps.get(group_id, 0)
            if is_archived:
                return Fate(group_id, sibling, SlotFate.TRAINED)
            if not is_in_cut:
                return Fate(group_id, sibling, SlotFate.UNUSED)
            if step > self.checkpoint_step or step not in self.steps:  # its archive is not there, or not all of it
                return Fate(group_id, sibling, SlotFate.TRAINED)
            return Fate(group_id, sibling, SlotFate.LOST, f"cut for step {step}, which trained without it")
        stored = self.stored.get(uid)
        if group_id in self.ended and stored is None:
            # Recorded for whatever nobody had settled; nobody acks after the end, until a lineage goes on from there.
            return Fate(group_id, sibling, SlotFate.LOST, "acknowledged, and gone before the run's end abandoned it")
        if fate not in (OPEN, IN_TRAINING):
            return Fate(group_id, sibling, fate)
        if stored is not None and not stored.damage:
            return Fate(group_id, sibling, fate if fate == IN_TRAINING else SlotFate.STORED)
        reason = stored.damage if stored else "acknowledged, and neither stored nor settled"
        return Fate(group_id, sibling, SlotFate.LOST, reason)


def _version_of(line: Mapping[str, Any]) -> Version:
    """Return the version that a step's line names; of one that names none, what survives everything."""
    text = str(line.get("weights_version", ""))
    return Version.parse(text) if is_version(text) else Version(0, 0)


def _how_open(num_stored: int, group_size: int) -> str:
    if num_stored >= group_size:
        return "open, wholly stored"
    return "open, partly stored" if num_stored else "open, nothing stored"


def _cut_slots(log: Iterable[Cut | Outcome]) -> dict[str, tuple[str, int]]:
    """Return group and sibling of every slot that a cut ever named, by sample uid."""
    return {
        item.slot.sample_uid: (group.group_id, item.slot.sibling)
        for entry in log
        if isinstance(entry, Cut)
        for group in entry.groups
        for item in group.slots
    }
