"""What a batch is cut out of: open groups with the slots that are stored, and what may be decided of them.

Pure; the ``planner`` decides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from areal_async.algorithms.credit import has_differing_replies, sibling_of
from areal_async.config.settings import SCARCE_SHARE
from areal_async.protocol.staleness import age_at
from areal_async.protocol.types import Cut, CutGroup, CutSlot, OutcomeKind, Slot, SlotStatus, StoredMessage, Version

SpanAge = Callable[[Version, Version], int]
"""Greatest age, in the step that is being cut, of a token sampled between two versions."""


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """One admitted group attempt that is not settled, with the slots that are stored."""

    group_id: str
    workflow: str
    group_size: int
    ticket_version: Version
    num_failed_attempts: int
    order: int
    """Number in the order of becoming known: older groups have lower ones."""
    slots: dict[int, CutSlot] = field(default_factory=dict)
    is_counted: bool = False
    """Whether it is counted among the groups found whole."""
    admitted_ns: int = 0
    """When its ticket was stored, by the broker's clock; 0 where that is not known."""
    stored_ns: int = 0
    """When the last of its slots was."""

    @property
    def is_complete(self) -> bool:
        return len(self.slots) == self.group_size

    @property
    def scored(self) -> list[CutSlot]:
        """Slots with a reward, by sibling."""
        return [self.slots[sibling] for sibling in sorted(self.slots) if _is_scored(self.slots[sibling].slot)]

    @property
    def spans(self) -> set[tuple[Version, Version]]:
        """Oldest and newest version of each scored slot; the ticket's stands for slots not stored yet."""
        stored = {(item.slot.oldest, item.slot.newest) for item in self.scored}
        spans = {(Version.parse(oldest), Version.parse(newest)) for oldest, newest in stored}
        return spans if spans and self.is_complete else spans | {(self.ticket_version, self.ticket_version)}

    def oldest_age(self, age: SpanAge) -> int:
        """The greatest age that any of its tokens can have."""
        return max(age(*span) for span in self.spans)

    def youngest_age(self, age: SpanAge) -> int:
        """The smallest age that any of its tokens is known to have."""
        return min(age(end, end) for span in self.spans for end in span)

    def add(self, message: StoredMessage) -> list[Slot]:
        """Take a message's slots; return those whose sibling another producer has stored before."""
        duplicates = []
        for slot in message.slots:
            if slot.sibling not in self.slots:
                self.stored_ns = max(self.stored_ns, message.stored_ns)
            held = self.slots.setdefault(slot.sibling, CutSlot(slot=slot, sequence=message.sequence))
            if held.slot.sample_uid != slot.sample_uid:
                duplicates.append(slot)
        return duplicates

    def verdict(self, *, min_group_size: int, filters_equal: bool = False) -> tuple[OutcomeKind, str] | None:
        """Say how a complete group ends without training, or None when it can train.

        Args:
            filters_equal: dynamic sampling, which trains no group whose rewards are all equal.
        """
        if len(self.scored) >= min_group_size:
            if filters_equal and not has_differing_replies([sibling_of(item.slot) for item in self.scored]):
                return OutcomeKind.FILTERED, f"all rewards are {self.scored[0].slot.reward:g}"
            return None
        failed = [item.slot for item in self.slots.values() if item.slot.status is SlotStatus.FAILED]
        if failed:
            return OutcomeKind.FAILED, failed[0].reason
        return OutcomeKind.REJECTED, next(item.slot.reason for item in self.slots.values() if not _is_scored(item.slot))

    def as_cut_group(self) -> CutGroup:
        return CutGroup(
            group_id=self.group_id,
            workflow=self.workflow,
            slots=self.scored,
            num_failed_attempts=self.num_failed_attempts,
            duration_s=max(0, self.stored_ns - self.admitted_ns) / 1e9 if self.admitted_ns else 0.0,
        )


class StreamRoom(IntEnum):
    """Room left in the stream of trajectories."""

    NONE = 0
    """A producer may be waiting for room."""
    SCARCE = 1
    """Nobody has to wait yet."""
    AMPLE = 2

    @classmethod
    def of(cls, num_bytes: int, *, largest: int, limit: int) -> "StreamRoom":
        """Return the room of a stream of ``limit`` bytes that holds ``num_bytes``, for messages up to ``largest``."""
        if num_bytes + largest > limit:
            return cls.NONE
        return cls.SCARCE if num_bytes >= SCARCE_SHARE * limit else cls.AMPLE


@dataclass(frozen=True, slots=True)
class Settle:
    """End these groups without training them."""

    group_ids: list[str]
    kind: OutcomeKind
    reason: str


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Ask again when something has changed, or after a while."""

    what_for: str
    on: tuple[str, ...] = ()
    """Names in ``wait_graph`` of what is waited for; none for the trainer's own next step."""


Decision = Settle | Cut | RetryLater
"""What is next: to end groups, to add an entry to the journal, or to wait."""


def ages_in(cut: Cut, lineage: int) -> Callable[[Version], int]:
    """Return how old a version is in the step of this cut, as a lineage trains it (``staleness.age_at``)."""
    branches = {int(number): shared for number, shared in cut.branches.items()}
    return lambda version: age_at(step=cut.step, version=version, lineage=lineage, branches=branches)


def _is_scored(slot: Slot) -> bool:
    return slot.status is SlotStatus.SCORED
