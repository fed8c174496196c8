"""What the trainer knows of the groups that are admitted, stored or settled, and which messages hold them.

Pure but for the deliveries it keeps for their later ack. Filled by three readers (tickets, the inbox, the
log), in any order and with repetitions: a slot counts once, a settled group stays settled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from areal_async.trainer.cut import OpenGroup
from areal_async.types import CutGroup, Outcome, OutcomeKind, SlotStatus, StoredMessage, Ticket, Version

D = TypeVar("D")
"""A delivery: opaque here."""


@dataclass(slots=True)
class Inventory(Generic[D]):
    """Open groups, and the un-acked messages of every group."""

    open: dict[str, OpenGroup] = field(default_factory=dict)
    closed: dict[str, frozenset[str] | None] = field(default_factory=dict)
    """Groups in a cut or with a settling outcome: nothing more that comes for them is trained. The value holds the
    sample uids that were there when it closed; None where they are not known any more (an older lineage's outcome)."""
    deliveries: dict[str, dict[int, D]] = field(default_factory=dict)
    """group id -> stream sequence -> delivery."""
    stored_bytes: int = 0
    """Of the deliveries held."""
    _num_bytes: dict[int, int] = field(default_factory=dict)
    _num_known: int = 0

    def add_ticket(self, ticket: Ticket) -> bool:
        """Note an admission; say whether it was news."""
        if ticket.group_id in self.closed or ticket.group_id in self.open:
            return False
        self._open(ticket.group_id, ticket.workflow, ticket.group_size, ticket.version, ticket.num_failed_attempts)
        return True

    def add_message(self, message: StoredMessage, delivery: D) -> list[Outcome]:
        """Take a stored message; return what is to be recorded of slots that cannot be used.

        A redelivery replaces the delivery it repeats. The returned outcomes carry lineage 0: the caller's to fill.
        """
        held = self.deliveries.setdefault(message.group_id, {})
        is_redelivery = message.sequence in held
        held[message.sequence] = delivery
        if is_redelivery:
            return []
        self._num_bytes[message.sequence] = message.num_bytes
        self.stored_bytes += message.num_bytes
        if message.group_id in self.closed:
            known = self.closed[message.group_id]
            scored = [slot for slot in message.slots if slot.status is SlotStatus.SCORED]
            late = [slot for slot in scored if known is not None and slot.sample_uid not in known]
            return [_of_slot(message.group_id, slot.sample_uid, OutcomeKind.LATE) for slot in late]
        if message.group_id not in self.open:
            self._open(
                message.group_id,
                message.workflow,
                message.group_size,
                message.ticket_version,
                message.num_failed_attempts,
            )
        duplicates = self.open[message.group_id].add(message)
        return [_of_slot(message.group_id, slot.sample_uid, OutcomeKind.DUPLICATE) for slot in duplicates]

    def close(self, group_ids: Iterable[str]) -> None:
        """Take groups out of the open ones: they are cut or settled."""
        for group_id in group_ids:
            group = self.open.pop(group_id, None)
            if group is not None:
                self.closed[group_id] = frozenset(item.slot.sample_uid for item in group.slots.values())
            else:
                self.closed.setdefault(group_id, None)

    def close_cut(self, groups: Iterable[CutGroup]) -> None:
        """Take the groups of a journalled cut out of the open ones."""
        for group in groups:
            self.close([group.group_id])
            stored = frozenset(item.slot.sample_uid for item in group.slots)
            self.closed[group.group_id] = (self.closed[group.group_id] or frozenset()) | stored

    def release(self, group_ids: Iterable[str]) -> list[D]:
        """Hand over the deliveries of groups whose fate is recorded, to be acked."""
        released = []
        for group_id in group_ids:
            for sequence, delivery in self.deliveries.pop(group_id, {}).items():
                self.stored_bytes -= self._num_bytes.pop(sequence, 0)
                released.append(delivery)
        return released

    def release_message(self, message: StoredMessage) -> list[D]:
        """Hand over the delivery of one message, to be acked."""
        delivery = self.deliveries.get(message.group_id, {}).pop(message.sequence, None)
        if delivery is None:
            return []
        self.stored_bytes -= self._num_bytes.pop(message.sequence, 0)
        return [delivery]

    def _open(self, group_id: str, workflow: str, group_size: int, version: str, num_failed_attempts: int) -> None:
        self._num_known += 1
        self.open[group_id] = OpenGroup(
            group_id=group_id,
            workflow=workflow,
            group_size=group_size,
            ticket_version=Version.parse(version),
            num_failed_attempts=num_failed_attempts,
            order=self._num_known,
        )


def _of_slot(group_id: str, sample_uid: str, kind: OutcomeKind) -> Outcome:
    return Outcome(group_id=group_id, kind=kind, lineage=0, sample_uid=sample_uid)
