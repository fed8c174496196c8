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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
from areal_async.trainer.card_turns import CardTurns
from areal_async.trainer.health import HISTORY_STEPS, Health
from areal_async.trainer.output.archive import MetricsFile
from areal_async.trainer.output.checkpointer import Checkpointer
from areal_async.trainer.output.publisher import WeightsPublisher
from areal_async.trainer.step_runner import StepRunner

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class Trainer:
    """One rank, from its restored checkpoint to the last step."""

    settings: Settings
    runner: StepRunner
    publisher: WeightsPublisher
    checkpointer: Checkpointer
    reader: JournalReader
    health: Health
    metrics_file: MetricsFile
    feed: BatchFeed | None
    """Rank 0's alone."""
    turns: CardTurns | None = None
    """Rank 0's alone; None where no GPU is shared with servers in turns."""
    last_line: Metrics | None = field(default=None, init=False)
    _wants_stop: bool = field(default=False, init=False)
    _state: str = field(default="starting", init=False)

    @property
    def step(self) -> int:
        """The newest one that is trained."""
        return self.runner.step

    @property
    def state(self) -> str:
        """What this rank does now."""
        step = self.runner.culprits_of
        return f"looking for what step {step} fails with" if step else self._state

    @property
    def waits_for(self) -> str:
        """What the next cut waits for; empty while a step runs, and on every rank but the first."""
        return self.feed.waits_for if self.feed is not None and self._state == "waiting" else ""

    def stop(self) -> None:
        """Finish the step that runs, checkpoint, and leave."""
        log.info("trainer.stop_requested", step=self.step)
        self._wants_stop = True
        self.publisher.first_evaluation.give_up()
        if self.feed is not None:
            self.feed.stop()

    async def restore(self, checkpoint: Path | None) -> None:
        """Load a checkpoint and drop what was written after it. Collective; before ``run``."""
        if checkpoint is not None:
            await self.runner.load(checkpoint)
        self.checkpointer.restored(self.step)
        if self.feed is not None:
            last_step = max(self.reader.journal.steps_to_replay(), default=self.step)
            self.metrics_file.abandon(after_step=last_step, lineage=self.runner.lineage)
            self.metrics_file.rewind(to_step=self.step, lineage=self.runner.lineage)
            journal = self.reader.journal
            await self.health.restore(self.metrics_file.newest(HISTORY_STEPS), survives=journal.survives)
            num_moved = self.checkpointer.abandon_archive()
            self.runner.check_ledger(self.reader.journal)
            await self.feed.on_checkpoint(self.step)
            lineage = self.runner.lineage
            log.info("trainer.restored", step=self.step, lineage=lineage, num_archives_abandoned=num_moved)

    async def run(self) -> None:
        """Replay what was journalled, announce where that led, and train on."""
        is_current = await self._replay()
        await self._checkpoint_now()
        if not is_current:
            return  # stopped: the servers hold newer weights than these, and the next trainer replays the rest
        await self._publish_weights()
        version = self.runner.version
        self._state = f"waiting for servers to hold {version}"
        with self.runner.waiting(wait_graph.weights(str(version)), "all servers to hold"):
            await self.publisher.wait_until_held(version, should_stop=lambda: self._wants_stop)
        await self.runner.prepare()
        await self._train()
        await self._checkpoint_now()
        if self.feed is not None:
            await self.feed.make_room()
        if self.step >= self.settings.run.steps:
            self._state = "exporting the model"
            await self.runner.export()
            await self.publisher.announce_final()  # last: whoever sees it may end the run
        await self.publisher.finish()
        self._state = "finished"
        log.info("trainer.finished", step=self.step)

    # the ring

    async def _replay(self) -> bool:
        """Train again, from the stored messages, what was journalled after the checkpoint; False when stopped early.

        Checkpointed after its first step, and whenever it has got twice as far: whatever killed the last trainer may
        kill this one as soon, and the next is to start further on.
        """
        first_step = due_step = self.step + 1
        for step in self.reader.journal.steps_to_replay():
            self._state = f"replaying step {step}"
            shard = await self.runner.fetch_again(self.reader.journal.cut_to_replay(step))
            async with self._turn(step):
                missing = await self.runner.exchange(shard, stop=self._wants_stop)
                if missing is None:
                    return False
                gone = [key for key, why in missing.items() if why == GONE]
                if gone:
                    log.warning("replay.ended", step=step, num_missing=len(gone))
                    if self.feed is not None:
                        why = f"{len(gone)} of its payloads are gone, of group {gone[0][0]} for one"
                        await self.feed.give_up_cuts(after_step=self.step, why=why)
                    break
                # What cannot be trained for another reason falls out, as it does when a cut is new.
                self._begin_step(shard.cut.step)
                result = await self.runner.run(shard, missing, waited_s=0.0)
            await self._record(result, weights_s=0.0)
            if self.step == due_step:
                await self._checkpoint()
                due_step += self.step + 1 - first_step
        return True

    async def _train(self) -> None:
        """Train the cuts of this lineage, until its journal ends or a stop."""
        send, receive = anyio.create_memory_object_stream[RankShard | None](0)
        async with anyio.create_task_group() as loops:
            loops.start_soon(self.reader.run_prefetch, self.runner.fetcher.fetch, send, self.step + 1)
            if self.feed is not None:
                self.feed.allow(self.step + 1)
                loops.start_soon(self.feed.run_journal, self.step + 1)
            await self._run_steps(receive)

    async def _run_steps(self, receive: MemoryObjectReceiveStream[RankShard | None]) -> None:
        async with receive:
            while True:
                self._state, since = "waiting", time.monotonic()
                try:
                    with self.runner.waiting(wait_graph.cut(self.step + 1), "the groups of"):
                        shard = await receive.receive()
                except anyio.EndOfStream:
                    return
                if shard is None:
                    await self._checkpoint_now()  # to make room: there may be none to go on with
                    continue
                async with self._turn(shard.cut.step):
                    missing = await self.runner.exchange(shard, stop=self._wants_stop)
                    if missing is None:
                        return
                    self._begin_step(shard.cut.step)
                    result = await self.runner.run(shard, missing, waited_s=time.monotonic() - since)
                weights_since = time.monotonic()
                is_due = self.step % self.runner.step_settings.trainer.checkpoint_every_steps == 0
                await self._publish_weights(is_kept=is_due or self.step >= self.settings.run.steps)
                await self._record(result, weights_s=time.monotonic() - weights_since)
                if is_due:
                    await self._checkpoint()
                if self.feed is not None:
                    self.feed.allow(self.step + 1)

    @asynccontextmanager
    async def _turn(self, step: int) -> AsyncIterator[None]:
        """Have the GPUs for a step, from before its first collective, for which all ranks wait, to after its last."""
        if self.turns is None:
            yield
            return
        before, self._state = self._state, f"taking the GPUs for step {step}"
        async with self.turns.turn(step):
            self._state = before
            yield

    def _begin_step(self, step: int) -> None:
        self._state = f"training step {step}"
        if self.feed is not None and self.settings.rollout.max_staleness > 0:
            self.feed.allow(step + 1)

    # what a step leaves behind

    async def _publish_weights(self, *, is_kept: bool = False) -> None:
        version = self.runner.version
        self._state = f"publishing {version}"
        with (
            wait_graph.doing(wait_graph.publication(str(version)), "the", waiter=wait_graph.rank(self.runner.rank)),
            spans.part_of_step(version, "publish weights"),
        ):
            await self.publisher.publish(version, is_kept=is_kept)

    async def _checkpoint(self) -> None:
        """Checkpoint what no checkpoint holds yet; it is written beside the next steps. The same on every rank."""
        self._state = f"copying for the checkpoint of step {self.step}"
        await self.checkpointer.start(self.runner.version, self.runner.ledger.encode())

    async def _checkpoint_now(self) -> None:
        """Checkpoint it, and wait until that is on disk, recorded and settled."""
        await self._checkpoint()
        self._state = f"writing the checkpoint of step {self.step}"
        await self.checkpointer.finish()

    async def _record(self, result: StepResult, *, weights_s: float) -> None:
        """Write the step's metrics line, and tell of it; rank 0's."""
        if self.feed is None:
            return
        spans.trained(
            result.version,
            self.runner.ledger.newest,
            since_s=result.started,
            wait_s=result.wait_s,
            train_s=result.train_s,
        )
        checkpoint_s, num_ended = self.checkpointer.take_held_up_s(), self.feed.planner.take_counts()
        line = metrics_line(result, weights_s=weights_s, checkpoint_s=checkpoint_s, num_ended=num_ended)
        self.health.settings = self.feed.now.health
        judged = await self.health.judge(line)
        self.metrics_file.append(judged)
        self.last_line = judged
        log.info("step.trained", **judged)
