"""Which groups are settled already, as the log says: their tickets need no work."""

from collections.abc import Sequence

import anyio

from areal_async.bus import Bus, JournalSnapshots, entries_after
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
        self._journal: Journal | None = None
        self._sequence = 0

    async def among(self, tickets: Sequence[Ticket]) -> set[str]:
        """Return which of the tickets' groups are settled as of now."""
        async with self._lock:
            journal = self._journal
            if journal is None:
                journal, self._sequence = await JournalSnapshots(self._bus).load_journal(keeps_slots=False)
                self._journal = journal
            async for message in entries_after(self._bus, self._sequence):
                entry = await self._bus.decode(message, Cut if message.subject == self._bus.names.cuts else Outcome)
                if isinstance(entry, Cut):
                    journal.add_cut(without_slots(entry), sequence=message.sequence)
                elif isinstance(entry, Outcome):
                    journal.add_outcome(entry)
                self._sequence = message.sequence
        return {ticket.group_id for ticket in tickets if is_settled(journal, ticket)}
