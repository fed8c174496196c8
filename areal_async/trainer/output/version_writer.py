"""Versions whose tensors lie dealt out in the host memory of the ranks, until rank 0 has them written or let go of.

Every rank keeps its part of each version that it has gathered; what becomes of it rank 0 says, who alone speaks to the
servers. Invariants: every version that is kept gets one order, the oldest first; orders have a thread and a group of
their own, so none waits for the disk; one version is written at a time.
"""

from collections import deque
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
from torch import Tensor

from areal_async.process.bell import Bell
from areal_async.protocol.types import Version, WeightsVersion
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.output.served import ServedWeights

WRITE, LET_GO, WAIT, END = b"write", b"let go", b"wait", b"end"
WAITS_PER_DEADLINE = 4
"""How often rank 0 has the others wait on, while it has no order for them."""


class VersionWriter:
    """One rank's part in writing versions."""

    def __init__(self, weights: ServedWeights, directory: Path, ranks: Ranks) -> None:
        """Write into ``directory``, the same one to all ranks. A collective, of all ranks in the same order."""
        self.weights = weights
        self.directory = directory
        self._rank = ranks.rank
        self._orders, self._writers = ranks.with_control_group(), ranks.with_control_group()
        self._ordering = EngineThread(ranks.device, "weights-orders")
        self._writing = EngineThread(ranks.device, "weights-writer")
        self._kept: deque[tuple[Version, dict[str, Tensor]]] = deque()
        self._is_closed = self._has_ended = False
        self._changed = Bell()

    def keep(self, version: Version, tensors: dict[str, Tensor]) -> None:
        """Keep this rank's part of a version that has been gathered. Every rank calls it."""
        self._kept.append((version, tensors))
        self._changed.ring()

    async def write(self) -> WeightsVersion:
        """Write the oldest version that is kept, on every rank; return what is announced of it. Rank 0's alone.

        Raises:
            PipelineError: some rank could not write.
        """
        kept = self._kept.popleft()
        await self._order(WRITE)
        return await self._write(*kept)

    async def let_go(self) -> None:
        """Drop the oldest version that is kept, on every rank. Rank 0's alone."""
        _, tensors = self._kept.popleft()
        self.weights.take_back(tensors)
        await self._order(LET_GO)

    async def run(self) -> None:
        """Do what rank 0 orders; as rank 0, have the others wait on.

        consumes:     rank 0's orders
        waits for:    the next one, which comes within a part of what a collective may take
        produces:     this rank's part of the files of versions
        unblocked by: ``close``
        """
        if self._rank == 0:
            while not self._is_closed:
                await self._order(WAIT)
                with anyio.move_on_after(self._orders.deadline_s / WAITS_PER_DEADLINE):
                    while not self._is_closed:
                        await self._changed.wait()
            return
        async with anyio.create_task_group() as jobs:
            while (order := await self._order()) != END:
                if order != WAIT:
                    await self._obey(order, jobs)
        self._has_ended = True
        self._changed.ring()

    async def close(self) -> None:
        """End ``run`` on every rank, once what was ordered is written. Every rank calls it."""
        self._is_closed = True
        self._changed.ring()
        if self._rank == 0:
            await self._order(END)
        else:
            while not self._has_ended:  # rank 0 may write for long; that it is there each order's deadline holds
                await self._changed.wait()

    async def _obey(self, order: bytes, jobs: anyio.abc.TaskGroup) -> None:
        with anyio.fail_after(self._orders.deadline_s):  # rank 0 has gathered it, so this rank is about to
            while not self._kept:
                await self._changed.wait()
        version, tensors = self._kept.popleft()
        if order == WRITE:
            jobs.start_soon(self._write, version, tensors)
        else:
            self.weights.take_back(tensors)

    async def _order(self, order: bytes | None = None) -> bytes:
        """Give rank 0's order, or return it on the others."""
        return await self._ordering.run(partial(self._orders.broadcast_bytes, order))

    async def _write(self, version: Version, tensors: dict[str, Tensor]) -> WeightsVersion:
        write = partial(self.weights.write, tensors, version, self.directory, self._writers)
        return await self._writing.run(write)
