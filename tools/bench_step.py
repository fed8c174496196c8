"""What a training step costs beside its model: cutting, fetching, archiving, publishing and recording 128 trajectories.

    python -m tools.bench_step                           # 16 groups of 8, 1,000 tokens each, a model of 3.4 MB
    python -m tools.bench_step --tokens 4000 --rounds 5
    python -m tools.bench_step --repository ../other     # another version of this repository too, in turns

A trainer's process as a run starts it, at a real broker, whose model alone does nothing: a step of it waits for
``--device-s`` without a processor, as for a GPU, or not at all. Every trajectory is stored before the trainer begins.
``step`` is the median time between two lines of ``metrics.jsonl`` without that wait: how much longer steps are because
of what is beside the model; ``processor`` is what a step takes of one. The parts are medians of a call, and how many
calls a step makes; those beside the next step hold nothing up.

The reference moves the same bytes with libraries alone, one after the other: nats-py gets each message and stores one
of the size of a cut, pyarrow writes the tokens, safetensors writes the weights, both synced, and hashlib hashes them.
All take turns, in an order that changes.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import os
import pkgutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any

import anyio
import nats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from nats.js.api import StreamConfig
from safetensors.numpy import save_file

from areal_async.bus import Bus, EmbeddedBroker, Role, credentials_path, declare, open_bus
from areal_async.config.settings import (
    BusSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TrainerSettings,
)
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.protocol.types import Slot, SlotStatus, Ticket, Trajectory, Version, WeightsVersion
from areal_async.protocol.wire import encode_message

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / "configs" / "models" / "tiny"
WORKFLOW = "bench"
NUM_GROUPS, GROUP_SIZE = 16, 8
SIBLINGS_PER_MESSAGE = 2
PROMPT_SHARE = 0.25
"""Of a trajectory's tokens."""
REFERENCE_STEPS = 5
BYTES_OF_A_SLOT = 270
"""In a cut."""
WARM_STEPS = 3
"""Left out of the medians, as are the last steps, which have none behind them."""
PARTS = {
    "cut": "areal_async.trainer.batch.lineage:Lineage.write_cut",
    "fetch": "areal_async.trainer.batch.payloads:ShardFetcher.fetch",
    "exchange": "areal_async.trainer.step_runner:StepRunner.exchange",
    "rows": "areal_async.trainer.shards:build_rows",
    "wait for the archive before": "areal_async.trainer.step_runner:StepRunner._archive",
    "add up metrics": "areal_async.trainer.shards:ShardTrainer.metrics",
    "publish weights": "areal_async.trainer.loop:Trainer._publish_weights",
    "record": "areal_async.trainer.loop:Trainer._record",
    "beside: write the archive": "areal_async.trainer.output.archive:write_archive",
    "beside: write the weights": "areal_async.trainer.output.served:ServedWeights.write",
    "beside: announce the weights": "areal_async.trainer.batch.lineage:Lineage.announce",
}
"""What is timed of a trainer."""


def bench_settings(directory: Path, *, num_steps: int, num_tokens: int) -> Settings:
    """Return the settings of a trainer's run; every other one is as it is by default."""
    return Settings(
        run=RunSettings(name="bench", directory=directory, steps=num_steps),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        rollout=RolloutSettings(
            group_size=GROUP_SIZE, min_group_size=1, batch_groups=NUM_GROUPS, max_staleness=num_steps
        ),
        trainer=TrainerSettings(token_budget=max(4096, num_tokens), checkpoint_every_steps=num_steps),
        bus=BusSettings(max_disk_bytes=16 << 30),
    )


# the trainer's process


class Stopwatch:
    """How long each part took, and when each step was recorded."""

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = defaultdict(list)
        self.steps: list[tuple[float, float]] = []
        """Monotonic time and seconds of processor after each step."""

    def time(self, name: str, place: str) -> None:
        """Time every call of a function, given as ``MODULE:NAME``, from now on."""
        module, _, path = place.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = pkgutil.resolve_name(f"{module}:{'.'.join(owners)}")
        called, took_s = getattr(owner, attribute), self.took_s[name]

        @wraps(called)
        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            result = called(*args, **kwargs)
            took_s.append(time.perf_counter() - since)
            return result

        @wraps(called)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            result = await called(*args, **kwargs)
            took_s.append(time.perf_counter() - since)
            return result

        setattr(owner, attribute, timed_async if asyncio.iscoroutinefunction(called) else timed)

    def note_steps(self) -> None:
        """Note from now on when each step's line is written."""
        from areal_async.trainer.output.archive import MetricsFile

        file: Any = MetricsFile
        append = file.append

        def noted(*args: Any) -> None:
            append(*args)
            self.steps.append((time.perf_counter(), time.process_time()))

        file.append = noted


def have_no_model(device_s: float) -> None:
    """Have every engine take ``device_s`` for a step, and nothing of a processor."""
    from areal_async.trainer.engine.policy import FsdpEngine
    from areal_async.trainer.engine.stats import StepStats

    numbers: dict[str, Any] = {one.name: 1 if one.name.startswith("num_") else 0.01 for one in fields(StepStats)}
    stats = StepStats(**numbers)

    def train_step(*_: Any, **__: Any) -> StepStats:
        time.sleep(device_s)
        return stats

    def logprobs(_: FsdpEngine, rows: Sequence[Any]) -> list[Any]:
        import torch

        return [torch.from_numpy(row.behave_logprobs) for row in rows]

    engine: Any = FsdpEngine
    engine.train_step = train_step
    engine.logprobs = logprobs


def be_trainer(settings: Settings, url: str, *, device_s: float) -> None:
    """Train in this process, and print what was timed as JSON."""
    from areal_async.trainer import main as trainer

    watch = Stopwatch()
    for name, place in PARTS.items():
        watch.time(name, place)
    watch.note_steps()
    have_no_model(device_s)
    trainer.run(settings, run_directory=settings.run_directory, bus_url=url)
    print(json.dumps({"parts": watch.took_s, "steps": watch.steps}), flush=True)


# what is around it


def make_message(index: int, siblings: Sequence[int], *, num_tokens: int) -> tuple[str, bytes, dict[str, str]]:
    """Make a message of random trajectories; return the group's id, payload and headers."""
    rng = np.random.default_rng([index, siblings[0]])
    group_id = f"0-{index}-0"
    num_prompt = int(num_tokens * PROMPT_SHARE)
    is_sampled = np.arange(num_tokens) >= num_prompt
    versions = np.where(is_sampled, Version(1, 0).pack(), -1).astype(np.int64)
    trajectories = [
        Trajectory(
            slot=Slot(
                sibling=sibling,
                sample_uid=f"{group_id}.{sibling}.bench",
                status=SlotStatus.SCORED,
                reward=float(sibling % 2),
                num_tokens=num_tokens,
                num_output_tokens=num_tokens - num_prompt,
                oldest="1-0",
                newest="1-0",
            ),
            sequences=[
                TokenSequence(
                    token_ids=rng.integers(0, 256, num_tokens, dtype=np.int32),
                    loss_mask=is_sampled,
                    logprobs=np.where(is_sampled, -rng.random(num_tokens), 0).astype(np.float32),
                    versions=versions,
                )
            ],
            info={"correct": float(sibling % 2)},
        )
        for sibling in siblings
    ]
    ticket = Ticket(group_id=group_id, workflow=WORKFLOW, row={}, group_size=GROUP_SIZE, version="1-0")
    payload, headers, _ = encode_message(trajectories, ticket)
    return group_id, payload, headers


async def serve(bus: Bus) -> None:
    """Be a server that holds every version as soon as it is announced."""
    revision = 0
    async for weights in bus.watch_key(bus.names.weights_key(), WeightsVersion):
        state = ServerState(server_id="n0-s0", node_id="n0", url="http://127.0.0.1:1", version=weights.version)
        revision = await bus.compare_and_set("server.n0-s0", state, revision)


async def store(bus: Bus, arguments: argparse.Namespace) -> None:
    """Store the trajectories of all steps, as a node does."""
    for index in range(NUM_GROUPS * arguments.steps):
        for first in range(0, GROUP_SIZE, SIBLINGS_PER_MESSAGE):
            siblings = range(first, first + SIBLINGS_PER_MESSAGE)
            group_id, payload, headers = make_message(index, siblings, num_tokens=arguments.tokens)
            await bus.publish(bus.names.trajectories(WORKFLOW, group_id), payload, headers=headers)


async def measure(arguments: argparse.Namespace, repository: Path, device_s: float) -> dict[str, Any]:
    """Return what a trainer of this repository has timed."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        settings = bench_settings(Path(folder), num_steps=arguments.steps, num_tokens=arguments.tokens)
        async with running(settings) as (broker, bus):
            await store(bus, arguments)
            own = repository / ".venv" / "bin" / "python"
            command = [str(own) if own.is_file() else sys.executable, __file__, "--trainer-of", broker.url]
            command += ["--directory", folder, "--steps", str(arguments.steps), "--tokens", str(arguments.tokens)]
            environment = {**os.environ, "PYTHONPATH": str(repository)}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, bus)
                words = [*command, "--device-s", str(device_s)]
                done = await anyio.run_process(words, stderr=None, env=environment, cwd=repository)
                tasks.cancel_scope.cancel()
    timed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return timed


async def measure_reference(arguments: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of libraries alone."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        settings = bench_settings(Path(folder), num_steps=arguments.steps, num_tokens=arguments.tokens)
        async with running(settings) as (broker, _):
            client = await nats.connect(
                broker.url,
                nkeys_seed=str(credentials_path(settings.run_directory, Role.OPERATOR)),
                inbox_prefix=Role.OPERATOR.inbox_prefix.encode(),
            )
            stream, took_s = client.jetstream(), []
            subject = f"areal.{settings.names.run}.raw"
            await stream.add_stream(StreamConfig(name="RAW", subjects=[f"{subject}.>"], allow_direct=True))
            starts = range(0, GROUP_SIZE, SIBLINGS_PER_MESSAGE)
            batch = [
                (index, range(first, first + SIBLINGS_PER_MESSAGE)) for index in range(NUM_GROUPS) for first in starts
            ]
            for index, siblings in batch:
                _, payload, headers = make_message(index, siblings, num_tokens=arguments.tokens)
                await stream.publish(f"{subject}.slots", payload, headers=headers)
            weights = {"all": np.fromfile(MODEL / "model.safetensors", dtype=np.uint8)}
            for _ in range(REFERENCE_STEPS):
                since = time.perf_counter()
                found = [await stream.get_msg("RAW", seq=1 + n, direct=True) for n in range(len(batch))]
                await stream.publish(f"{subject}.cut", bytes(BYTES_OF_A_SLOT * NUM_GROUPS * GROUP_SIZE))
                write_plainly(Path(folder), [one.data or b"" for one in found], weights)
                took_s.append(time.perf_counter() - since)
            await client.close()
    return took_s


def write_plainly(folder: Path, messages: Sequence[bytes], weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write the tokens of some messages, and weights, with libraries alone; synced."""
    columns = [np.frombuffer(data[: len(data) // 4 * 4], dtype=np.int32) for data in messages]
    pq.write_table(pa.table({"token_ids": columns}), folder / "tokens.parquet")
    save_file(dict(weights), folder / "weights.safetensors")
    hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    for name in ("tokens.parquet", "weights.safetensors"):
        descriptor = os.open(folder / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[tuple[EmbeddedBroker, Bus]]:
    """A broker with the run's streams, and who may do everything there."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        credentials = credentials_path(settings.run_directory, Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=credentials) as bus:
            await declare(bus, settings)
            yield broker, bus
    finally:
        await broker.aclose()


def report(title: str, timed: Sequence[dict[str, Any]], device_s: float, reference_s: float) -> None:
    """Print what trainers have timed."""
    step_s: list[float] = []
    processor_s: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    num_steps = 0
    for one in timed:
        counted = one["steps"][WARM_STEPS:-WARM_STEPS]
        num_steps += len(one["steps"])
        for (before_s, before_cpu_s), (after_s, after_cpu_s) in itertools.pairwise(counted):
            step_s.append(after_s - before_s - device_s)
            processor_s.append(after_cpu_s - before_cpu_s)
        for name, took_s in one["parts"].items():
            parts[name] += took_s
    median_s = statistics.median(step_s)
    ratio = median_s / reference_s
    print(
        f"\n{title}, {device_s * 1000:.0f} ms on a device: step {median_s * 1000:.1f} ms, {ratio:.2f} x reference; ",
        end="",
    )
    print(f"processor {statistics.median(processor_s) * 1000:.1f} ms")
    for name, took_s in parts.items():
        print(f"  {name:<30} {statistics.median(took_s) * 1000:7.1f} ms  {len(took_s) / num_steps:5.1f} calls")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of a trainer in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000, help="of a trajectory")
    parser.add_argument("--device-s", type=float, action="append", help="each is measured (0 and 0.3)")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; else a temporary one")
    parser.add_argument("--repository", type=Path, help="another version, measured in turns with this one")
    parser.add_argument("--trainer-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps <= 2 * WARM_STEPS + 1:
        parser.error(
            f"--steps: got {arguments.steps}, need more than {2 * WARM_STEPS + 1}: the first and last do not count"
        )
    if arguments.trainer_of:
        settings = bench_settings(arguments.directory, num_steps=arguments.steps, num_tokens=arguments.tokens)
        be_trainer(settings, arguments.trainer_of, device_s=arguments.device_s[0])
        return 0
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    versions = {"this": REPOSITORY} | ({"other": arguments.repository.resolve()} if arguments.repository else {})
    waits = arguments.device_s or [0.0, 0.3]
    reference: list[float] = []
    timed: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)

    def refer() -> None:
        reference.extend(anyio.run(measure_reference, arguments))

    def train(name: str, device_s: float) -> None:
        timed[name, device_s].append(anyio.run(measure, arguments, versions[name], device_s))

    jobs: list[Callable[[], None]] = [refer]
    jobs += [partial(train, name, device_s) for device_s in waits for name in versions]
    for number in range(arguments.rounds):
        for job in jobs if number % 2 == 0 else reversed(jobs):
            job()
    reference_s = statistics.median(reference)
    print(f"reference {reference_s * 1000:.1f} ms; load {os.getloadavg()[0]:.1f}")
    for (name, device_s), found in sorted(timed.items(), key=lambda one: one[0][1]):
        report(name, found, device_s, reference_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
