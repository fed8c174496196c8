"""The checkpoints of a run: copied between two steps, written beside the next ones, and then all that rests on them.

    stage -> [beside the next steps: archive -> written, synced, renamed -> bucket -> outcomes -> acks -> room on disk]

Invariants: the ledger in a folder is that of the step that was staged; nothing is recorded, settled or removed before
the folder is durable on every rank; there is one checkpoint at a time, and the next waits for it.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import anyio.to_thread
import structlog

from areal_async.config.settings import Settings
from areal_async.process.failpoints import failpoint
from areal_async.protocol.types import CheckpointRecord, Version
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.checkpoint import CheckpointWriter
from areal_async.trainer.engine.digests import digest_of_sums
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.archive import abandon_archive
from areal_async.trainer.output.checkpoint_retention import keep

log = structlog.get_logger()


class Checkpointer:
    """One rank's part in them."""

    def __init__(
        self,
        settings: Settings,
        run_directory: Path,
        *,
        ranks: Ranks,
        engines: Engines,
        thread: EngineThread,
        writer: CheckpointWriter,
        archiving: BackgroundJob,
        beside: BackgroundJob,
        lineage: Lineage | None,
        feed: BatchFeed | None,
    ) -> None:
        """``lineage`` and ``feed`` are rank 0's alone.

        Args:
            thread: the engine's.
            archiving: of the batches that made the weights.
        """
        self._settings = settings
        self._directory = run_directory.resolve()
        self._rank = ranks.rank
        self._engines = engines
        self._thread = thread
        self._own_thread = EngineThread("checkpoint")
        self._writer = writer
        self._archiving = archiving
        self._beside = beside
        self._lineage = lineage
        self._feed = feed
        self._restored_step = self._staged_step = 0
        self._held_up_s = 0.0
        self.durable_step = 0
        """Of the newest checkpoint that is on disk."""

    def restored(self, step: int) -> None:
        """Begin from the checkpoint of ``step``, or from none at 0."""
        self._restored_step = self._staged_step = self.durable_step = step

    async def start(self, version: Version, ledger: bytes) -> None:
        """Checkpoint the engines as they are now, which is ``version``; nothing when that has been done.

        Returns once they may change. Every rank calls it, after the same steps.
        """
        if version.step == self._staged_step:
            return
        since = time.monotonic()
        await self.finish()
        self._staged_step = version.step
        folder = self._directory / "checkpoints" / str(version)
        if self._settings.trainer.async_checkpoints:
            with self._waiting("the copies for"):
                await self._thread.run(lambda: self._engines.stage_checkpoint(self._writer))
            write = functools.partial(self._own_thread.run, lambda: self._writer.write(folder, ledger))
            await self._beside.start(functools.partial(self._make, version, folder, write, since))
        else:
            write = functools.partial(self._thread.run, lambda: self._engines.save_checkpoint(folder, ledger))
            await self._beside.start(functools.partial(self._make, version, folder, write, since))
            await self.finish()
        self._held_up_s += time.monotonic() - since

    async def finish(self) -> None:
        """Wait until the last checkpoint is written, and what rests on it done; one that failed cancels whoever waits.

        Every rank may call it whenever it likes.
        """
        with self._waiting("the writing of"):
            await self._beside.finish()

    def take_held_up_s(self) -> float:
        """Return for how many seconds checkpoints have held up the steps since the last call."""
        held_up_s, self._held_up_s = self._held_up_s, 0.0
        return held_up_s

    def abandon_archive(self) -> int:
        """Move what older lineages have archived of later steps out of the way; return how many files. Rank 0's."""
        assert self._lineage is not None
        return abandon_archive(
            self._directory / "trajectories", after_step=self._restored_step, before_lineage=self._lineage.number
        )

    async def _make(self, version: Version, folder: Path, write: Callable[[], Awaitable[None]], since: float) -> None:
        with spans.part_of_step(version, "checkpoint"):
            await self._write(version, folder, write, since)

    async def _write(self, version: Version, folder: Path, write: Callable[[], Awaitable[None]], since: float) -> None:
        staged_s = time.monotonic() - since
        await self._archiving.finish()
        failpoint("trainer.before_checkpoint")
        await write()  # on every rank, and each has archived its part before
        failpoint("trainer.after_checkpoint")
        self.durable_step = version.step
        if self._lineage is not None and self._feed is not None:
            record = CheckpointRecord(version=str(version), path=str(folder), sums_sha256=digest_of_sums(folder))
            await self._lineage.record_checkpoint(record)
            await self._feed.on_checkpoint(version.step)
            await anyio.to_thread.run_sync(self.abandon_archive)
            keeping = functools.partial(keep, self._directory, self._feed.now, recorded=version)
            await anyio.to_thread.run_sync(keeping)
            self._feed.notify()
        log.info(
            "checkpoint.written",
            step=version.step,
            staged_s=round(staged_s, 3),
            duration_s=round(time.monotonic() - since, 3),
        )

    def _waiting(self, what: str) -> AbstractContextManager[wait_graph.Wait]:
        return wait_graph.on(wait_graph.checkpoint(self._staged_step), what, waiter=wait_graph.rank(self._rank))
