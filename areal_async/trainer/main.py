"""The trainer's process: one rank. Started torchrun-style; everything it needs to know is in the run directory."""

import functools
import signal
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from areal_async.bus import Bus, Role, open_run_bus, serving
from areal_async.config.settings import Settings
from areal_async.inference.weight_group import GLOO, NCCL
from areal_async.process import interned_names, stacks
from areal_async.protocol.types import Version
from areal_async.telemetry import log as logging
from areal_async.telemetry import wait_graph
from areal_async.telemetry.exporters.prometheus import exporting
from areal_async.telemetry.exporters.traces import recording
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.reader import JournalReader
from areal_async.trainer.begin import begin
from areal_async.trainer.card_turns import CardTurns
from areal_async.trainer.engine.checkpoint import CheckpointWriter
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks, ranks_started
from areal_async.trainer.engine.threads import BackgroundJob
from areal_async.trainer.going_back import go_back_before
from areal_async.trainer.health import Health
from areal_async.trainer.loop import Trainer
from areal_async.trainer.output.archive import MetricsFile
from areal_async.trainer.output.broadcast import Broadcaster, address_towards
from areal_async.trainer.output.checkpointer import Checkpointer
from areal_async.trainer.output.first_evaluation import FirstEvaluation
from areal_async.trainer.output.publisher import WeightsPublisher
from areal_async.trainer.output.served import ServedWeights, sends_adapter
from areal_async.trainer.output.version_writer import VersionWriter
from areal_async.trainer.step_runner import StepRunner

METRICS_INTERVAL_S = 1.0
RANK_DEADLINE_S = 600.0
"""How long one rank waits for another, besides what a broadcast may hold up rank 0: its own deadline, and that of the
bucket it is over in."""

log = structlog.get_logger()


def run(settings: Settings, *, run_directory: Path, bus_url: str) -> None:
    """Train as one rank until the run's last step, a stop, or an error."""
    settings = _as_started(settings)
    deadline_s = RANK_DEADLINE_S + 2 * settings.inference.transfer_deadline_s
    if settings.inference.colocate == "release":
        deadline_s += settings.inference.start_bound_s  # rank 0 may wait for servers that share its GPU
    with joined_ranks(deadline_s=deadline_s, num_threads=settings.trainer.num_threads) as ranks:
        if ranks.rank:  # rank 0 says when all stop, and a scheduler asks each of its processes
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        logging.configure(f"trainer-{ranks.rank}", run_directory / "logs")
        stacks.install(stacks.path_for(run_directory, f"trainer-{ranks.rank}"))
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
        engines = Engines.for_run(settings, ranks)
        writer = CheckpointWriter(ranks) if settings.trainer.async_checkpoints else None
        versions = VersionWriter(
            ServedWeights(
                engines.actor,
                bucket_bytes=settings.inference.bucket_bytes,
                is_adapter=sends_adapter(settings),
                is_broadcast=settings.inference.weight_transfer == "distributed",
                has_deltas=settings.launch.weights_cache is not None,
            ),
            run_directory.resolve() / "weights",
            ranks,
        )
        interned_names.settle_table()
        main = functools.partial(
            _run_rank, settings, run_directory.resolve(), bus_url, engines=engines, writer=writer, versions=versions
        )
        with recording(settings, run_directory, role="trainer", instance=str(ranks.rank)):
            anyio.run(main, backend_options={"use_uvloop": True})


def _as_started(settings: Settings) -> Settings:
    """Return the settings for as many ranks as were started: where a host is gone, perhaps fewer than they say."""
    trainer = settings.trainer
    num_hosts = ranks_started() // trainer.ranks_per_host
    if not trainer.elastic or num_hosts == trainer.num_hosts:
        return settings
    return settings.model_copy(update={"trainer": trainer.on_hosts(num_hosts)})


async def _run_rank(
    settings: Settings,
    run_directory: Path,
    bus_url: str,
    *,
    engines: Engines,
    writer: CheckpointWriter | None,
    versions: VersionWriter,
) -> None:
    ranks = engines.actor.dims.all
    async with (
        open_run_bus(settings, run_directory, bus_url, Role.TRAINER, instance=str(ranks.rank)) as bus,
        anyio.create_task_group() as loops,
    ):
        lineage = await Lineage.take(bus) if ranks.rank == 0 else None
        beginning = await begin(ranks, lineage)
        structlog.contextvars.bind_contextvars(lineage=beginning.lineage)
        restored_step = Version.parse(Path(beginning.checkpoint).name).step if beginning.checkpoint else 0
        reader = JournalReader(
            bus, lineage=beginning.lineage, restored_step=restored_step, keeps_snapshots=lineage is not None
        )
        loops.start_soon(reader.run)
        await reader.read_through(beginning.sequence)
        feed = BatchFeed(bus, settings, lineage, reader.journal) if lineage is not None else None
        threads = EngineThreads.for_run(settings, ranks)
        broadcaster = _broadcaster(settings, lineage, bus_url=bus_url, ranks=ranks)
        publisher = WeightsPublisher(
            settings=settings.inference,
            versions=versions,
            thread=threads.engine,
            writing=BackgroundJob(loops),
            copying=BackgroundJob(loops),
            holding=BackgroundJob(loops),
            first_evaluation=FirstEvaluation.of_run(bus, settings),
            bus=bus,
            lineage=lineage,
            broadcaster=broadcaster,
        )
        archiving = BackgroundJob(loops)
        checkpointer = Checkpointer(
            directory=run_directory,
            engines=engines,
            thread=threads.engine,
            writer=writer,
            archiving=archiving,
            writing=BackgroundJob(loops),
            feed=feed,
        )
        runner = StepRunner(
            settings=settings,
            directory=run_directory,
            bus=bus,
            engines=engines,
            threads=threads,
            archiving=archiving,
            lineage=beginning.lineage,
            feed=feed,
        )
        turns = await _card_turns(bus, settings, feed, restored_step, loops)
        trainer = Trainer(
            settings=settings,
            runner=runner,
            publisher=publisher,
            checkpointer=checkpointer,
            reader=reader,
            health=Health(
                settings.health,
                bus,
                go_back=functools.partial(go_back_before, bus, run_directory, lambda: reader.journal),
            ),
            metrics_file=MetricsFile(run_directory / "metrics.jsonl"),
            feed=feed,
            turns=turns,
        )
        loops.start_soon(versions.run)
        if lineage is not None:
            loops.start_soon(publisher.run_repairs)
        loops.start_soon(_run_metrics, bus, trainer, ranks.rank, settings, run_directory)
        await trainer.restore(Path(beginning.checkpoint) if beginning.checkpoint else None)
        if feed is not None:
            await _start_feed(loops, feed, trainer)
        await trainer.run()
        await publisher.close()
        await _emit_state(bus, trainer, ranks.rank)  # the last one: that it has finished
        if broadcaster is not None:
            broadcaster.close()
        loops.cancel_scope.cancel()


async def _card_turns(
    bus: Bus, settings: Settings, feed: BatchFeed | None, restored_step: int, loops: TaskGroup
) -> CardTurns | None:
    """Begin to take turns with servers on the same cards, as rank 0; None where they have their own."""
    if feed is None or settings.inference.colocate != "release":
        return None
    turns = CardTurns(bus, feed.lineage, settings.inference, clock=feed.clock)
    await turns.begin(restored_step)
    loops.start_soon(turns.run_beats)
    return turns


async def _start_feed(loops: TaskGroup, feed: BatchFeed, trainer: Trainer) -> None:
    """Start what rank 0 alone does; orders that were given before are known, and signals heard, when it returns."""
    loops.start_soon(feed.run_inbox)
    loops.start_soon(feed.run_tickets)
    loops.start_soon(feed.run_images)
    await loops.start(feed.run_changes)
    await loops.start(_run_signals, trainer)


def _broadcaster(settings: Settings, lineage: Lineage | None, *, bus_url: str, ranks: Ranks) -> Broadcaster | None:
    if lineage is None or settings.inference.weight_transfer != "distributed":
        return None
    return Broadcaster(
        prefix=f"{settings.run.name}-{lineage.number}",
        address=address_towards(bus_url),
        backend=NCCL if ranks.device.type == "cuda" else GLOO,
        deadline_s=settings.inference.transfer_deadline_s,
    )


async def _run_metrics(bus: Bus, trainer: Trainer, rank: int, settings: Settings, run_directory: Path) -> None:
    """Publish the state of this rank every second and whenever asked, and each step's line as it comes."""
    emitted = 0

    def report() -> dict[str, Any]:
        return {**_state(bus, trainer, rank), "last_step": trainer.last_line}

    async with (
        serving(bus, instance=str(rank), description="a rank of the trainer", report=report),
        exporting(settings, run_directory, role="trainer", instance=str(rank), report=report),
    ):
        while True:
            if trainer.last_line is not None and trainer.step != emitted:
                emitted = trainer.step
                await bus.emit(bus.names.metrics("trainer", "0"), msgspec.json.encode(trainer.last_line))
            await _emit_state(bus, trainer, rank)
            await anyio.sleep(METRICS_INTERVAL_S)


async def _emit_state(bus: Bus, trainer: Trainer, rank: int) -> None:
    await bus.emit(bus.names.metrics("trainer", str(rank)), msgspec.json.encode(_state(bus, trainer, rank)))


def _state(bus: Bus, trainer: Trainer, rank: int) -> dict[str, Any]:
    """Return the state of this rank. Rank 0 reports the whole trainer; the others report that they live."""
    now: dict[str, Any] = {"rank": rank, "lineage": trainer.runner.lineage}
    now["waits"] = wait_graph.report(wait_graph.rank(rank))
    if rank == 0:
        now |= {"state": trainer.state, "waits_for": trainer.waits_for, "step": trainer.step}
        now |= {"hold": "" if trainer.turns is None else trainer.turns.hold}
        now |= {"num_dead_letters": bus.num_dead_letters, "alarms": trainer.health.sentences}
    return now


async def _run_signals(trainer: Trainer, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            trainer.stop()
