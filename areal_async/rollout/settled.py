"""Which groups are settled already, as the log says: their tickets need no work."""

from collections.abc import Sequence

import anyio

from areal_async.bus import Bus
from areal_async.protocol.journal import Journal, without_slots
from areal_async.protocol.types import Cut, Outcome, Ticket


def is_settled(journal: Journal, ticket: Ticket) -> bool:
    """Return whether the ticket's group has ended, as the log says: it needs no work, whatever is stored of it."""
    return ticket.group_id in journal.settled


class SettledGroups:
    """Reads the log on demand, each time only what is new.

    Its journal entries too: what an older lineage recorded after a newer one had begun does not count.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = anyio.Lock()
        self._next_sequence = 1
        self._journal = Journal()

    async def among(self, tickets: Sequence[Ticket]) -> list[bool]:
        """Say of each ticket whether its group is settled as of now."""
        names = self._bus.names
        async with self._lock:
            async for message in self._bus.find_messages(
                names.outcomes_stream, names.log, start_sequence=self._next_sequence
            ):
                self._next_sequence = message.sequence + 1
                entry = await self._bus.decode(message, Cut if message.subject == names.cuts else Outcome)
                if isinstance(entry, Cut):
                    self._journal.add_cut(without_slots(entry), sequence=message.sequence)
                elif isinstance(entry, Outcome):
                    self._journal.add_outcome(entry)
        return [is_settled(self._journal, ticket) for ticket in tickets]
