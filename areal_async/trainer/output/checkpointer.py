"""The checkpoints of a run: copied between two steps, written beside the next ones, and then all that rests on them.

    stage -> [beside the next steps: archive -> written, synced, renamed -> bucket -> outcomes -> acks -> room on disk]

Invariants: the ledger in a folder is that of the step that was staged; nothing is recorded, settled or removed before
the folder is durable on every rank; there is one checkpoint at a time, and the next waits for it.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread
import structlog

from areal_async.process.failpoints import failpoint
from areal_async.process.freed_memory import give_back_freed
from areal_async.protocol.types import CheckpointRecord, Version
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.engine.checkpoint import CheckpointWriter
from areal_async.trainer.engine.digests import digest_of_sums
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.archive import abandon_archive
from areal_async.trainer.output.checkpoint_retention import keep

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class Checkpointer:
    """One rank's part in the checkpoints of a run."""

    directory: Path
    """The run's, absolute; they are in its ``checkpoints``."""
    engines: Engines
    thread: EngineThread
    """The policy's, in which the engines may be read."""
    writer: CheckpointWriter | None
    """Holds the copies of what is written while the engines go on; None writes them while they wait."""
    archiving: BackgroundJob
    """Writes the batches that made the weights; a checkpoint waits for it."""
    writing: BackgroundJob
    """Writes the checkpoints."""
    feed: BatchFeed | None
    """Rank 0's alone."""
    _writing_thread: EngineThread = field(init=False)
    _restored_step: int = field(default=0, init=False)
    _staged_step: int = field(default=0, init=False)
    _held_up_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._writing_thread = EngineThread(self.thread.device, "checkpoint")

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
        folder = self.directory / "checkpoints" / str(version)
        writer = self.writer
        if writer is not None:
            with self._waiting("the copies for"):
                await self.thread.run(lambda: writer.stage(self.engines.trained))
            write = functools.partial(self._writing_thread.run, lambda: writer.write(folder, ledger))
        else:
            write = functools.partial(self.thread.run, lambda: self.engines.save_checkpoint(folder, ledger))
        await self.writing.start(functools.partial(self._write, version, folder, write, since))
        if writer is None:
            await self.finish()
        self._held_up_s += time.monotonic() - since

    async def finish(self) -> None:
        """Wait until the last checkpoint is written, and what rests on it done; one that failed cancels the waiter.

        Every rank may call it at any time.
        """
        with self._waiting("the writing of"):
            await self.writing.finish()

    def take_held_up_s(self) -> float:
        """Return the seconds for which checkpoints have held up the steps since the last call."""
        held_up_s, self._held_up_s = self._held_up_s, 0.0
        return held_up_s

    def abandon_archive(self) -> int:
        """Move the files that older lineages archived of later steps away; return their number. Rank 0 calls it."""
        assert self.feed is not None
        return abandon_archive(
            self.directory / "trajectories", after_step=self._restored_step, before_lineage=self.feed.lineage.number
        )

    async def _write(self, version: Version, folder: Path, write: Callable[[], Awaitable[None]], since: float) -> None:
        with spans.part_of_step(version, "checkpoint"):
            staged_s = time.monotonic() - since
            await self.archiving.finish()
            failpoint("trainer.before_checkpoint")
            await write()  # on every rank, and each has archived its part before
            failpoint("trainer.after_checkpoint")
            if self.feed is not None:
                record = CheckpointRecord(version=str(version), path=str(folder), sums_sha256=digest_of_sums(folder))
                await self.feed.lineage.record_checkpoint(record)
                await self.feed.on_checkpoint(version.step)
                await anyio.to_thread.run_sync(self.abandon_archive)
                keeping = functools.partial(keep, self.directory, self.feed.now, recorded=version)
                await anyio.to_thread.run_sync(keeping)
                self.feed.notify()
            await anyio.to_thread.run_sync(give_back_freed)
            seconds = {"staged_s": round(staged_s, 3), "duration_s": round(time.monotonic() - since, 3)}
            log.info("checkpoint.written", step=version.step, **seconds)

    def _waiting(self, what: str) -> AbstractContextManager[wait_graph.Wait]:
        return wait_graph.on(
            wait_graph.checkpoint(self._staged_step), what, waiter=wait_graph.rank(self.engines.actor.dims.all.rank)
        )
