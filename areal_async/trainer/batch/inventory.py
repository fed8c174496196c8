"""What the trainer knows of the groups that are admitted, stored or settled, and which messages hold them.

Pure but for the deliveries it keeps for their later ack. Filled by three readers (tickets, the inbox, the
log), in any order and with repetitions: a slot counts once, a settled group stays settled.

What it keeps of groups that have ended are numbers, nearly all of which follow one another (``id_sets``): which groups
they were, and which messages have come. That tells what is late of a group, however long ago it ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from areal_async.protocol.id_sets import GroupIds, NumberSet
from areal_async.protocol.types import Outcome, OutcomeKind, SlotStatus, StoredMessage, Ticket, Version
from areal_async.trainer.batch.cut import OpenGroup

D = TypeVar("D")
"""A delivery: opaque here."""


@dataclass(slots=True)
class Inventory(Generic[D]):
    """Open groups, and the un-acked messages of every group."""

    open: dict[str, OpenGroup] = field(default_factory=dict)
    closed: GroupIds = field(default_factory=GroupIds)
    """Groups in a cut or with a settling outcome: nothing more that comes for them is trained."""
    deliveries: dict[str, dict[int, D]] = field(default_factory=dict)
    """group id -> stream sequence -> delivery."""
    stored_bytes: int = 0
    """Of the deliveries held."""
    is_caught_up: bool = False
    """Whatever was stored before this lineage began has come."""
    _have_come: NumberSet = field(default_factory=NumberSet)
    """Stream sequences. A broker that lost messages may use one again: so they only say what is not recorded twice."""
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
        is_new = self.is_caught_up and message.sequence not in self._have_come
        self._have_come.add(message.sequence)
        if message.group_id in self.closed:
            # What is delivered again may be what was trained; so may whatever was there before this lineage.
            late = [slot for slot in message.slots if is_new and slot.status is SlotStatus.SCORED]
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
            self.open.pop(group_id, None)
            self.closed.add(group_id)

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
        held = self.deliveries.get(message.group_id, {})
        delivery = held.pop(message.sequence, None)
        if delivery is None:
            return []
        if not held:
            del self.deliveries[message.group_id]
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
