"""Every rank's view of the journal: the one place from which batches come.

All ranks read the same log in the same order, so they agree on what to train without telling each other.
"""

import anyio

from areal_async.bus import Bus
from areal_async.journal import Journal
from areal_async.types import Cut, Outcome


class JournalReader:
    """Follows the log; hands out the cut of a step once it is there."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sequence = 0
        self._changed = anyio.Event()
        self.journal = Journal()

    async def run(self) -> None:
        """Follow the log for ever."""
        names = self._bus.names
        async for message in self._bus.follow(names.outcomes_stream, names.log):
            entry = await self._bus.decode(message, Cut if message.subject == names.cuts else Outcome)
            if isinstance(entry, Cut):
                self.journal.add_cut(entry, sequence=message.sequence)
            elif isinstance(entry, Outcome):
                self.journal.add_outcome(entry)
            self._sequence = message.sequence
            self._changed.set()
            self._changed = anyio.Event()

    async def read_through(self, sequence: int) -> None:
        """Wait until the log is read up to ``sequence``."""
        while self._sequence < sequence:
            await self._changed.wait()

    async def cut_of(self, step: int, *, lineage: int) -> Cut | None:
        """Wait for the cut that ``lineage`` itself made for ``step``; None when it ended before."""
        while True:
            cut = self.journal.cuts.get(step)
            if cut is not None and cut.lineage == lineage:
                return cut
            if self.journal.is_ended and self.journal.lineage == lineage:
                return None
            await self._changed.wait()
