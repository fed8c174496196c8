"""Counts of the trajectories whose publish was acknowledged, by what became of them, from the doctor's findings."""

import threading
from collections import Counter
from dataclasses import dataclass, field

import anyio

from areal_async.doctor import Diagnosis, examine
from areal_async.doctor.audit.reconciliation import IN_TRAINING, SlotFate
from areal_async.doctor.audit.report import ViolationKind
from areal_async.launch.run_directory import RunDirectory

COUNTED = (ViolationKind.LOST, ViolationKind.TWICE, ViolationKind.OVER_AGE)
NOT_DROPPED = (
    "acknowledged",
    "in the broker",
    SlotFate.TRAINED,
    SlotFate.STORED,
    IN_TRAINING,
    *(kind.value for kind in COUNTED),
)

EXAMINING = threading.Lock()
"""Rows go on two at a time, and the library that reads a run's data does not bear two threads."""


@dataclass(slots=True)
class SlotCounts:
    """Numbers and ids of a run's trajectories."""

    acked: int = 0
    trained: int = 0
    stored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    over_age: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Findings against any other promise."""

    def add(self, other: "SlotCounts") -> None:
        """Add the counts of another run."""
        self.acked += other.acked
        self.trained += other.trained
        self.stored += other.stored
        self.dropped += other.dropped
        self.lost += other.lost
        self.twice += other.twice
        self.over_age += other.over_age
        self.broken += other.broken


def count_slots(directory: RunDirectory) -> SlotCounts:
    """Examine a run, which must be at rest if its broker is its own.

    Raises:
        UserError: the run cannot be examined.
    """

    async def examine_it() -> Diagnosis:
        return await examine(directory.read_settings(), directory.path, directory.read_bus_url())

    with EXAMINING:
        return counts_of(anyio.run(examine_it))


def counts_of(diagnosis: Diagnosis) -> SlotCounts:
    """Return the figures of a diagnosis."""
    findings = [one for ruling in diagnosis.rulings for one in ruling.findings]
    ids = {kind: sorted({one.id for one in findings if one.kind is kind}) for kind in COUNTED}
    return SlotCounts(
        acked=diagnosis.slots["acknowledged"],
        trained=diagnosis.slots.get(SlotFate.TRAINED, 0),
        stored=diagnosis.slots.get(SlotFate.STORED, 0) + diagnosis.slots.get(IN_TRAINING, 0),
        dropped=Counter({kind: count for kind, count in diagnosis.slots.items() if kind not in NOT_DROPPED}),
        lost=ids[ViolationKind.LOST],
        twice=ids[ViolationKind.TWICE],
        over_age=ids[ViolationKind.OVER_AGE],
        broken=[f"{one.kind} {one.id}: {one.text}" for one in findings if one.kind not in COUNTED],
    )
