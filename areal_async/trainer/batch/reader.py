"""Every rank's view of the journal: the one place from which batches come.

All ranks read the same log in the same order, so they agree on what to train without telling each other.
"""

from collections.abc import Awaitable, Callable

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from areal_async.bus import Bus, JournalSnapshots
from areal_async.process.bell import Bell
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind
from areal_async.trainer.batch.lineage import read_entry
from areal_async.trainer.batch.payloads import RankShard

Fetch = Callable[[Cut], Awaitable[RankShard]]
"""Returns this rank's shard of a cut."""


class JournalReader:
    """Follows the log; hands out the cut of a step once it is there."""

    def __init__(self, bus: Bus, *, lineage: int, restored_step: int, keeps_snapshots: bool = False) -> None:
        """Follow it for the trainer of ``lineage``, which begins from the checkpoint of ``restored_step``.

        Args:
            keeps_snapshots: of what it has read, for who starts next; rank 0 alone may.
        """
        self._bus = bus
        self._lineage = lineage
        self._snapshots = JournalSnapshots(bus)
        self._keeps_snapshots = keeps_snapshots
        self._sequence = 0
        self._changed = Bell()
        self.journal = Journal(own_lineage=lineage, own_step=restored_step)

    async def run(self) -> None:
        """Follow the log until cancelled, from the newest snapshot on."""
        names, own = self._bus.names, self.journal
        self.journal, sequence = await self._snapshots.load_journal(own_lineage=own.own_lineage, own_step=own.own_step)
        async for message in self._bus.follow(names.outcomes_stream, names.log, start_sequence=sequence + 1):
            await read_entry(self._bus, message, self.journal)
            self._sequence = message.sequence
            self._changed.ring()
            if self._keeps_snapshots:
                await self._snapshots.offer(message, self.journal)

    async def read_through(self, sequence: int) -> None:
        """Wait until the log is read up to ``sequence``."""
        while self._sequence < sequence:
            await self._changed.wait()

    async def next_entry(self, step: int, *, is_checkpointed: bool) -> Cut | None:
        """Wait for what is to be done next: the checkpoint before ``step``, unless it is made, or the cut of ``step``.

        The same on every rank: a checkpoint is asked for before the cut is written, or not at all.
        """
        journal, lineage = self.journal, self._lineage
        while True:
            if journal.lineage == lineage and step - 1 in journal.checkpoints and not is_checkpointed:
                return Cut(kind=CutKind.CHECKPOINT, lineage=lineage, step=step - 1)
            cut = journal.cuts.get(step)
            if cut is not None and cut.lineage == lineage:
                return cut
            if journal.is_ended and journal.lineage == lineage:
                return None
            await self._changed.wait()

    async def run_prefetch(self, fetch: Fetch, send: MemoryObjectSendStream[RankShard | None], first_step: int) -> None:
        """Hand over what the journal says next: a batch, fetched, or None for a checkpoint before it."""
        async with send:
            step, is_checkpointed = first_step, False
            while entry := await self.next_entry(step, is_checkpointed=is_checkpointed):
                is_checkpointed = entry.kind is CutKind.CHECKPOINT
                try:
                    await send.send(None if is_checkpointed else await fetch(entry))
                except anyio.BrokenResourceError:
                    return  # stopped before this step
                step += not is_checkpointed
