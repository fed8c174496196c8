"""The trainer's ring: cut -> payloads -> rows -> step -> weights -> event, the same on every rank.

``run_prefetch``  (of the ``JournalReader``) consumes the journal; waits for the next cut; produces verified payloads
                  one step ahead; unblocked by rank 0's feed
``run_steps``     consumes those; waits for them and for its peers; produces a weights version per step, an
                  archive file, and copies for a checkpoint when due, which is written meanwhile; unblocks the
                  planner (``BatchFeed.allow``) and, through the announced weights, the servers and the controller

The asyncio side waits, the engine's one thread computes. Collectives are called in the same order on every
rank; which steps exist is decided by the journal alone.
"""

import time
from pathlib import Path

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream

from areal_async.config.settings import Settings
from areal_async.protocol.types import Metrics
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.payloads import GONE, RankShard
from areal_async.trainer.batch.reader import JournalReader
from areal_async.trainer.batch.step import StepResult, metrics_line
from areal_async.trainer.health import HISTORY_STEPS, Health
from areal_async.trainer.output.archive import MetricsFile
from areal_async.trainer.output.checkpointer import Checkpointer
from areal_async.trainer.output.publisher import WeightsPublisher
from areal_async.trainer.step_runner import StepRunner

log = structlog.get_logger()


class Trainer:
    """One rank, from its restored checkpoint to the last step."""

    def __init__(
        self,
        settings: Settings,
        run_directory: Path,
        *,
        runner: StepRunner,
        publisher: WeightsPublisher,
        checkpointer: Checkpointer,
        reader: JournalReader,
        health: Health,
        feed: BatchFeed | None,
    ) -> None:
        """``feed`` is rank 0's alone."""
        self._settings = settings
        self._runner = runner
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._reader = reader
        self._health = health
        self._feed = feed
        self._metrics_file = MetricsFile(run_directory / "metrics.jsonl")
        self._wants_stop = False
        self._state = "starting"
        self.last_line: Metrics | None = None

    @property
    def step(self) -> int:
        """The newest one that is trained."""
        return self._runner.step

    @property
    def state(self) -> str:
        """What this rank does now."""
        step = self._runner.culprits_of
        return f"looking for what step {step} fails with" if step else self._state

    @property
    def alarms(self) -> list[str]:
        """What is wrong with learning now, a sentence each."""
        return self._health.sentences

    @property
    def waits_for(self) -> str:
        """What the next cut waits for; empty while a step runs, and on every rank but the first."""
        return self._feed.waits_for if self._feed is not None and self._state == "waiting" else ""

    def stop(self) -> None:
        """Finish the step that runs, checkpoint, and leave."""
        log.info("trainer.stop_requested", step=self.step)
        self._wants_stop = True
        if self._feed is not None:
            self._feed.stop()

    async def restore(self, checkpoint: Path | None) -> None:
        """Load a checkpoint and drop what was written after it. Collective; before ``run``."""
        if checkpoint is not None:
            await self._runner.load(checkpoint)
        self._checkpointer.restored(self.step)
        if self._feed is not None:
            self._metrics_file.rewind(to_step=self.step)
            await self._health.restore(self._metrics_file.newest(HISTORY_STEPS))
            num_moved = self._checkpointer.abandon_archive()
            self._runner.check_ledger(self._reader.journal)
            await self._feed.on_checkpoint(self.step)
            lineage = self._runner.lineage
            log.info("trainer.restored", step=self.step, lineage=lineage, num_archives_abandoned=num_moved)

    async def run(self) -> None:
        """Replay what was journalled, announce where that led, and train on."""
        is_current = await self._replay()
        await self._checkpoint_now()
        if not is_current:
            return  # stopped: the servers hold newer weights than these, and the next trainer replays the rest
        await self._publish_weights()
        version = self._runner.version
        self._state = f"waiting for servers to hold {version}"
        with self._runner.waiting(wait_graph.weights(str(version)), "all servers to hold"):
            await self._publisher.wait_until_held(version, should_stop=lambda: self._wants_stop)
        await self._train()
        await self._checkpoint_now()
        if self._feed is not None:
            await self._feed.make_room()
        if self.step >= self._settings.run.steps:
            self._state = "exporting the model"
            await self._runner.export()
            await self._publisher.announce_final()  # last: whoever sees it may end the run
        await self._publisher.finish()
        self._state = "finished"
        log.info("trainer.finished", step=self.step)

    # the ring

    async def _replay(self) -> bool:
        """Train again, from the stored messages, what was journalled after the checkpoint; False when stopped early.

        Checkpointed after its first step, and whenever it has got twice as far: whatever killed the last trainer may
        kill this one as soon, and the next is to start further on.
        """
        first_step = due_step = self.step + 1
        for step in self._reader.journal.steps_to_replay():
            self._state = f"replaying step {step}"
            shard = await self._runner.fetch_again(self._reader.journal.cut_to_replay(step))
            missing = await self._runner.exchange(shard, stop=self._wants_stop)
            if missing is None:
                return False
            gone = [key for key, why in missing.items() if why == GONE]
            if gone:
                log.warning("replay.ended", step=step, num_missing=len(gone))
                if self._feed is not None:
                    why = f"{len(gone)} of its payloads are gone, of group {gone[0][0]} for one"
                    await self._feed.give_up_cuts(after_step=self.step, why=why)
                break
            # What cannot be trained for another reason falls out, as it does when a cut is new.
            self._begin_step(shard.cut.step)
            result = await self._runner.run(shard, missing, waited_s=0.0)
            await self._record(result, weights_s=0.0)
            if self.step == due_step:
                await self._checkpoint()
                due_step += self.step + 1 - first_step
        return True

    async def _train(self) -> None:
        """Train the cuts of this lineage, until its journal ends or a stop."""
        send, receive = anyio.create_memory_object_stream[RankShard | None](0)
        async with anyio.create_task_group() as loops:
            loops.start_soon(self._reader.run_prefetch, self._runner.fetcher.fetch, send, self.step + 1)
            if self._feed is not None:
                self._feed.allow(self.step + 1)
                loops.start_soon(self._feed.run_journal, self.step + 1)
            await self._run_steps(receive)

    async def _run_steps(self, receive: MemoryObjectReceiveStream[RankShard | None]) -> None:
        async with receive:
            while True:
                self._state, since = "waiting", time.monotonic()
                try:
                    with self._runner.waiting(wait_graph.cut(self.step + 1), "the groups of"):
                        shard = await receive.receive()
                except anyio.EndOfStream:
                    return
                if shard is None:
                    await self._checkpoint_now()  # to make room: there may be none to go on with
                    continue
                missing = await self._runner.exchange(shard, stop=self._wants_stop)
                if missing is None:
                    return
                self._begin_step(shard.cut.step)
                result = await self._runner.run(shard, missing, waited_s=time.monotonic() - since)
                weights_since = time.monotonic()
                await self._publish_weights()
                await self._record(result, weights_s=time.monotonic() - weights_since)
                if self.step % self._runner.step_settings.trainer.checkpoint_every_steps == 0:
                    await self._checkpoint()
                if self._feed is not None:
                    self._feed.allow(self.step + 1)

    def _begin_step(self, step: int) -> None:
        self._state = f"training step {step}"
        if self._feed is not None and self._settings.rollout.max_staleness > 0:
            self._feed.allow(step + 1)

    # what a step leaves behind

    async def _publish_weights(self) -> None:
        version = self._runner.version
        self._state = f"publishing {version}"
        with (
            wait_graph.doing(wait_graph.publication(str(version)), "the", waiter=wait_graph.rank(self._runner.rank)),
            spans.part_of_step(version, "publish weights"),
        ):
            await self._publisher.publish(version)

    async def _checkpoint(self) -> None:
        """Checkpoint what no checkpoint holds yet; it is written beside the next steps. The same on every rank."""
        self._state = f"copying for the checkpoint of step {self.step}"
        await self._checkpointer.start(self._runner.version, self._runner.ledger.encode())

    async def _checkpoint_now(self) -> None:
        """Checkpoint it, and wait until that is on disk, recorded and settled."""
        await self._checkpoint()
        self._state = f"writing the checkpoint of step {self.step}"
        await self._checkpointer.finish()

    async def _record(self, result: StepResult, *, weights_s: float) -> None:
        """Write the step's metrics line, and tell of it; rank 0's."""
        if self._feed is None:
            return
        spans.trained(
            result.version,
            self._runner.ledger.newest,
            since_s=result.started,
            wait_s=result.wait_s,
            train_s=result.train_s,
        )
        dropped_stale, failed = self._feed.planner.take_counts()
        line = metrics_line(
            result,
            weights_s=weights_s,
            checkpoint_s=self._checkpointer.take_held_up_s(),
            dropped_stale=dropped_stale,
            failed=failed,
        )
        self._health.settings = self._feed.now.health
        judged = await self._health.judge(line)
        self._metrics_file.append(judged)
        self.last_line = judged
        log.info("step.trained", **judged)
