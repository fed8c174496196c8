"""The checkpoints of a run: copied between two steps, written beside the next ones, and then all that rests on them.

    stage -> [beside the next steps: archive -> written, synced, renamed -> bucket -> outcomes -> acks -> room on disk]

Invariants: the ledger in a folder is that of the step that was staged; nothing is recorded, settled or removed before
the folder is durable on every rank; there is one checkpoint at a time, and the next waits for it.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.archive import abandon_archive
from areal_async.trainer.output.checkpoint_retention import keep

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSource:
    """What one rank's checkpoints are made of, and the thread in which it may be read."""

    engines: Engines
    thread: EngineThread
    """The policy's."""
    writer: CheckpointWriter
    """Holds the copies of what is written while the engines go on."""


class Checkpointer:
    """One rank's part in the checkpoints of a run."""

    def __init__(
        self,
        settings: Settings,
        run_directory: Path,
        *,
        rank: int,
        source: CheckpointSource,
        archiving: BackgroundJob,
        writing: BackgroundJob,
        lineage: Lineage | None,
        feed: BatchFeed | None,
    ) -> None:
        """Write into ``checkpoints`` of the run's directory. ``lineage`` and ``feed`` are rank 0's alone.

        Args:
            archiving: writes the batches that made the weights; a checkpoint waits for it.
            writing: writes the checkpoints.
        """
        self._settings = settings
        self._directory = run_directory.resolve()
        self._rank = rank
        self._source = source
        self._thread = EngineThread("checkpoint")
        self._archiving = archiving
        self._writing = writing
        self._lineage = lineage
        self._feed = feed
        self._restored_step = self._staged_step = 0
        self._held_up_s = 0.0

    def restored(self, step: int) -> None:
        """Begin from the checkpoint of ``step``, or from none at 0."""
        self._restored_step = self._staged_step = step

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
        engines, thread, writer = self._source.engines, self._source.thread, self._source.writer
        is_async = self._settings.trainer.async_checkpoints
        if is_async:
            with self._waiting("the copies for"):
                await thread.run(lambda: engines.stage_checkpoint(writer))
            write = functools.partial(self._thread.run, lambda: writer.write(folder, ledger))
        else:
            write = functools.partial(thread.run, lambda: engines.save_checkpoint(folder, ledger))
        await self._writing.start(functools.partial(self._write, version, folder, write, since))
        if not is_async:
            await self.finish()
        self._held_up_s += time.monotonic() - since

    async def finish(self) -> None:
        """Wait until the last checkpoint is written, and what rests on it done; one that failed cancels the waiter.

        Every rank may call it at any time.
        """
        with self._waiting("the writing of"):
            await self._writing.finish()

    def take_held_up_s(self) -> float:
        """Return the seconds for which checkpoints have held up the steps since the last call."""
        held_up_s, self._held_up_s = self._held_up_s, 0.0
        return held_up_s

    def abandon_archive(self) -> int:
        """Move the files that older lineages archived of later steps away; return their number. Rank 0 calls it."""
        assert self._lineage is not None
        return abandon_archive(
            self._directory / "trajectories", after_step=self._restored_step, before_lineage=self._lineage.number
        )

    async def _write(self, version: Version, folder: Path, write: Callable[[], Awaitable[None]], since: float) -> None:
        with spans.part_of_step(version, "checkpoint"):
            staged_s = time.monotonic() - since
            await self._archiving.finish()
            failpoint("trainer.before_checkpoint")
            await write()  # on every rank, and each has archived its part before
            failpoint("trainer.after_checkpoint")
            if self._lineage is not None and self._feed is not None:
                record = CheckpointRecord(version=str(version), path=str(folder), sums_sha256=digest_of_sums(folder))
                await self._lineage.record_checkpoint(record)
                await self._feed.on_checkpoint(version.step)
                await anyio.to_thread.run_sync(self.abandon_archive)
                keeping = functools.partial(keep, self._directory, self._feed.now, recorded=version)
                await anyio.to_thread.run_sync(keeping)
                self._feed.notify()
            seconds = {"staged_s": round(staged_s, 3), "duration_s": round(time.monotonic() - since, 3)}
            log.info("checkpoint.written", step=version.step, **seconds)

    def _waiting(self, what: str) -> AbstractContextManager[wait_graph.Wait]:
        return wait_graph.on(wait_graph.checkpoint(self._staged_step), what, waiter=wait_graph.rank(self._rank))
