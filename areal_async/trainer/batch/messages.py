"""The stored messages that a lineage has received and not acked: of which group, and how many bytes of the stream.

Pure: a delivery is opaque here. Filled by redeliveries and in any order. Of what was acked it keeps numbers, nearly all
of which follow one another (``id_sets``): they tell a message that is delivered again from one that is new.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

from areal_async.protocol.id_sets import NumberSet
from areal_async.protocol.types import StoredMessage

D = TypeVar("D")
"""A delivery: opaque here."""


class UnackedMessages(Generic[D]):
    """The deliveries of every group, open or ended, to be acked when nothing rests on them any more."""

    def __init__(self) -> None:
        self.deliveries: dict[str, dict[int, D]] = {}
        """group id -> stream sequence -> delivery."""
        self.num_bytes = 0
        """Stored bytes of all of them together."""
        self._bytes_of: dict[int, int] = {}
        self._have_come = NumberSet()
        """Stream sequences. They say only what is not recorded twice: a broker that lost messages may use one again."""

    def add(self, message: StoredMessage, delivery: D) -> bool:
        """Keep a delivery in the place of the one it repeats; say whether it repeats none."""
        held = self.deliveries.setdefault(message.group_id, {})
        is_redelivery = message.sequence in held
        held[message.sequence] = delivery
        if not is_redelivery:
            self._bytes_of[message.sequence] = message.num_bytes
            self.num_bytes += message.num_bytes
        return not is_redelivery

    def has_come(self, sequence: int) -> bool:
        """Say whether a message of this stream sequence came before, and note that it has come."""
        has_come = sequence in self._have_come
        self._have_come.add(sequence)
        return has_come

    def release(self, group_ids: Iterable[str]) -> list[D]:
        """Hand over every delivery of some groups, to be acked."""
        return [
            self._let_go(group_id, one) for group_id in group_ids for one in list(self.deliveries.get(group_id, ()))
        ]

    def release_message(self, message: StoredMessage) -> list[D]:
        """Hand over the delivery of one message, to be acked."""
        if message.sequence not in self.deliveries.get(message.group_id, ()):
            return []
        return [self._let_go(message.group_id, message.sequence)]

    def _let_go(self, group_id: str, sequence: int) -> D:
        held = self.deliveries[group_id]
        delivery = held.pop(sequence)
        if not held:
            del self.deliveries[group_id]
        self.num_bytes -= self._bytes_of.pop(sequence, 0)
        return delivery
