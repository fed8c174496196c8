"""The processes of ``bench_scale`` that speak with all nodes: the real controller, and rank 0's side of the bus.

Rank 0 computes nothing, and takes as long as it is told for a step. Cuts, payloads, outcomes, acks and records are
those of a run; its checkpoint is the ledger alone.
"""

import gc
import sys
import time
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.abc
import msgspec
import torch

from areal_async.bus import Bus, Role, open_run_bus, serving
from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.tasks import Tasks
from areal_async.protocol.types import CheckpointRecord, Version, WeightsVersion
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.ledger import Ledger
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import RankShard, ShardFetcher
from areal_async.trainer.batch.reader import JournalReader
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.first_evaluation import FirstEvaluation
from areal_async.trainer.output.publisher import WeightsPublisher
from tools.scale_nodes import WORKFLOW, Job, Lines, read_job

NUM_ROWS = 10_000
ROW = {"question": "how many of them are there, if each of two has three and one of these is gone? " * 2}


async def run_controller(job: Job, settings: Settings) -> None:
    """Be the controller, as its process is."""
    started_s, lines = time.monotonic(), Lines(job)
    tasks = Tasks([(WORKFLOW, [ROW] * NUM_ROWS)])

    class Timed(Controller):
        """Notes when it has read what there was."""

        async def run_admission(self) -> None:
            lines.note = {"ready_s": time.monotonic() - started_s, "num_read": _num_received(bus)}
            await super().run_admission()

    async with (
        open_run_bus(settings, settings.run_directory, job.url, Role.CONTROLLER) as bus,
        anyio.create_task_group() as beside,
    ):
        accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
        beside.start_soon(lines.run)
        await Timed(bus, settings, tasks, None, accounts=accounts).run()
        beside.cancel_scope.cancel()


def _num_received(bus: Bus) -> int:
    """Return how many messages have come over this connection."""
    return int(bus.connection.client.stats["in_msgs"])


class RankZero:
    """Rank 0 without its engine: takes the lineage, trains what is cut, checkpoints, announces."""

    def __init__(self, job: Job, settings: Settings, bus: Bus, lines: Lines) -> None:
        self._job, self._settings, self._bus, self._lines = job, settings, bus, lines
        self._folder = settings.run_directory / "checkpoints"

    async def run(self, loops: anyio.abc.TaskGroup) -> None:
        """Train until the last step."""
        settings, bus, started_s = self._settings, self._bus, time.monotonic()
        lineage = await Lineage.take(bus)
        await lineage.read_log()
        sequence = await lineage.write_begin()
        path = Path(lineage.checkpoint.path) if lineage.checkpoint is not None else None
        self._ledger = Ledger(Version(0, 0)) if path is None else Ledger.decode(path.read_bytes(), what=str(path))
        restored = self._ledger.version.step
        reader = JournalReader(bus, lineage=lineage.number, restored_step=restored, keeps_snapshots=True)
        loops.start_soon(reader.run)
        await reader.read_through(sequence)
        feed = BatchFeed(bus, settings, lineage, reader.journal)
        for step, trained in self._ledger.steps():
            assert not reader.journal.unknown_to(step, trained)
        await feed.on_checkpoint(restored)
        self._lines.step = restored
        self._lines.note = {"ready_s": time.monotonic() - started_s, "num_read": _num_received(bus)}
        fetcher = ShardFetcher(bus=bus, limits=TrainingLimits(settings), own_slots=list, lineage=lineage.number)
        loops.start_soon(feed.run_inbox)
        loops.start_soon(feed.run_tickets)
        await loops.start(feed.run_changes)
        publisher = self._publisher(loops, lineage)
        loops.start_soon(publisher.run_repairs)
        loops.start_soon(self._run_metrics)
        for step in reader.journal.steps_to_replay():
            cut = reader.journal.cut_to_replay(step)
            shard = await fetcher.fetch(cut)
            assert not shard.missing
            self._ledger.add(Version(lineage.number, step), [one.group_id for one in cut.groups])
        self._step = self._ledger.version.step
        await self._checkpoint(lineage, feed)
        await self._announce(publisher, lineage)
        await publisher.wait_until_held(Version(lineage.number, self._step), should_stop=lambda: False)
        send, receive = anyio.create_memory_object_stream[RankShard | None](0)
        loops.start_soon(reader.run_prefetch, fetcher.fetch, send, self._step + 1)
        feed.allow(self._step + 1)
        loops.start_soon(feed.run_journal, self._step + 1)
        await self._train(receive, feed, publisher, lineage)

    async def _train(
        self,
        receive: anyio.abc.ObjectReceiveStream[RankShard | None],
        feed: BatchFeed,
        publisher: WeightsPublisher,
        lineage: Lineage,
    ) -> None:
        due_s = time.monotonic()
        every = self._settings.trainer.checkpoint_every_steps
        async for shard in receive:
            if shard is None:
                await self._checkpoint(lineage, feed)
                continue
            assert not shard.missing, shard.missing
            step = shard.cut.step
            feed.allow(step + 1)
            due_s = max(due_s + self._job.step_s, time.monotonic())
            await anyio.sleep(max(0.0, due_s - time.monotonic()))
            self._ledger.add(Version(lineage.number, step), [one.group_id for one in shard.cut.groups])
            self._step = self._lines.step = step
            await self._announce(publisher, lineage)
            if step % every == 0:
                await self._checkpoint(lineage, feed)
            feed.allow(step + 1)

    async def _checkpoint(self, lineage: Lineage, feed: BatchFeed) -> None:
        """Write the ledger, which is all there is to restore here, and do what rests on a checkpoint."""
        version = Version(lineage.number, self._step)
        self._ledger.version = version
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{version}.json"
        path.write_bytes(self._ledger.encode())
        await lineage.record_checkpoint(CheckpointRecord(version=str(version), path=str(path)))
        await feed.on_checkpoint(self._step)
        for older in self._folder.iterdir():
            if older != path:
                older.unlink()
        feed.notify()

    async def _announce(self, publisher: WeightsPublisher, lineage: Lineage) -> None:
        version = str(Version(lineage.number, self._step))
        is_last = self._step >= self._settings.run.steps
        await publisher._announce(WeightsVersion(version=version, path=f"/weights/{version}", final=is_last))

    def _publisher(self, loops: anyio.abc.TaskGroup, lineage: Lineage) -> WeightsPublisher:
        return WeightsPublisher(
            settings=self._settings.inference,
            versions=cast(Any, None),
            thread=EngineThread(torch.device("cpu")),
            writing=BackgroundJob(loops),
            copying=BackgroundJob(loops),
            holding=BackgroundJob(loops),
            first_evaluation=FirstEvaluation(self._bus, ()),
            bus=self._bus,
            lineage=lineage,
            broadcaster=None,
        )

    async def _run_metrics(self) -> None:
        def report() -> dict[str, Any]:
            waits = wait_graph.report(wait_graph.rank(0))
            return {"rank": 0, "waits": waits, "state": "training", "step": self._lines.step, "hold": ""}

        async with serving(self._bus, instance="0", description="a rank of the trainer", report=report):
            while True:
                await self._bus.emit(self._bus.names.metrics("trainer", "0"), msgspec.json.encode(report()))
                await anyio.sleep(1.0)


async def run_trainer(job: Job, settings: Settings) -> None:
    """Be rank 0."""
    lines = Lines(job)
    async with (
        open_run_bus(settings, settings.run_directory, job.url, Role.TRAINER) as bus,
        anyio.create_task_group() as loops,
    ):
        loops.start_soon(lines.run)
        await RankZero(job, settings, bus, lines).run(loops)
        loops.cancel_scope.cancel()


ROLES = {"controller": run_controller, "trainer": run_trainer}


if __name__ == "__main__":
    gc.freeze()  # what was imported, as a role does (``cli.roles``)
    gc.collect()  # which forgets how many these were: a role imports while nothing is counted
    anyio.run(ROLES[sys.argv[1]], *read_job(sys.argv[2]), backend_options={"use_uvloop": True})
