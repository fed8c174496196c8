"""What durability costs: our publishing and settling of trajectories beside raw nats-py, on the same broker.

    python -m tools.bench_bus                            # 16 KB trajectories, groups of 16, `sync_interval: always`
    python -m tools.bench_bus --replicas 3               # publishing to three servers, on this host, beside one

Every figure is trajectories per second over the same messages (a group's sixteen travel in one):

publish          ours: an outbox per group; raw: `js.publish` of ready-made messages, as many at once
publish+settle   one client publishes while another takes what comes and settles it. Ours: the consumer brings headers,
                 and messages are removed as a trainer removes them, a batch at a time (``bus.Sweep``); raw: `fetch`,
                 which brings payloads as well, and one `ack_sync` for each message
and read         ours also gets every payload directly, verifies its checksums and its values, and makes arrays of it,
                 as the ranks of a trainer do; raw as before

The client that takes is a process of its own, as a trainer is. In every round both do the same, one right after the
other and each first in turn; the ratio is the median of the rounds' ratios, so that what else the machine does meets
both. With ``--replicas 3`` the cluster's three servers share this host, so the ratio says what three copies cost at
most. Exits with 1 below 0.8 for the first ratio or 1.2 for the second; the third has no bound.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import nats
import numpy as np
from anyio.streams.buffered import BufferedByteReceiveStream
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from areal_async.bus import Bus, Delivery, EmbeddedBroker, Role, credentials_path, declare, open_bus
from areal_async.bus.sweep import Sweep
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.types import CutSlot, Sequence, Slot, SlotStatus, Ticket, Trajectory, Version
from areal_async.protocol.wire import decode_headers, encode_message
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import BatchSlot, fetch

WORKFLOW = "bench"
GROUP_SIZE = 16
BYTES_PER_TOKEN = 4 + 1 + 4 + 8
"""Token id, mask, logprob and version."""
NUM_PUBLISHING = 32
"""Groups published at once, 8 MB of messages."""
FETCH_MESSAGES = 32
SETTLE_MESSAGES = 32
"""A batch."""
RAW_STREAM = "RAW"
RAW_CONSUMER = "raw"
READY = b"<ready>\n"
LEAST_RATIOS = {"publish": 0.8, "publish+settle": 1.2, "and read": 0.0}


T = TypeVar("T")
Message = tuple[bytes, dict[str, str]]
"""Payload and headers."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sixteen trajectories and the message that they make."""

    ticket: Ticket
    trajectories: list[Trajectory]

    def message(self) -> Message:
        """Encode them as an outbox does, for a contender without one."""
        payload, headers, _ = encode_message(self.trajectories, self.ticket)
        return payload, {**headers, "Nats-Msg-Id": f"raw.{self.ticket.group_id}"}


def make_groups(count: int, *, num_bytes: int, first: int) -> list[Group]:
    """Make groups of random trajectories of ``num_bytes`` each, with ids from ``first`` on."""
    rng = np.random.default_rng(first)
    num_tokens = num_bytes // BYTES_PER_TOKEN
    groups = []
    for index in range(first, first + count):
        group_id = f"0-{index}-0"
        trajectories = [
            Trajectory(
                slot=Slot(
                    sibling=sibling,
                    sample_uid=f"{group_id}.{sibling}.bench",
                    status=SlotStatus.SCORED,
                    reward=1.0,
                    num_tokens=num_tokens,
                    num_output_tokens=num_tokens - 1,
                    oldest="1-0",
                    newest="1-0",
                ),
                sequences=[
                    Sequence(
                        token_ids=rng.integers(0, 1 << 16, num_tokens, dtype=np.int32),
                        loss_mask=np.ones(num_tokens, dtype=bool),
                        logprobs=-rng.random(num_tokens, dtype=np.float32),
                        versions=np.full(num_tokens, Version(1, 0).pack(), dtype=np.int64),
                    )
                ],
            )
            for sibling in range(GROUP_SIZE)
        ]
        ticket = Ticket(group_id=group_id, workflow=WORKFLOW, row={}, group_size=GROUP_SIZE, version="1-0")
        groups.append(Group(ticket, trajectories))
    return groups


async def for_each(items: list[T], publish: Callable[[T], Awaitable[None]]) -> None:
    """Publish all of them, ``NUM_PUBLISHING`` at once."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await publish(item)

    async with anyio.create_task_group() as tasks:
        for _ in range(NUM_PUBLISHING):
            tasks.start_soon(work)


async def publish_ours(node: Bus, receipts: PublishLog, groups: list[Group]) -> None:
    """Store groups as a node does."""
    backpressure = Backpressure()

    async def publish(group: Group) -> None:
        outbox = Outbox(
            node,
            group.ticket,
            producer="bench",
            num_expected=GROUP_SIZE,
            linger_s=0.0,
            backpressure=backpressure,
            publish_log=receipts,
        )
        for trajectory in group.trajectories:
            outbox.put(trajectory)
        await outbox.run()

    await for_each(groups, publish)


async def settle_ours(trainer: Bus, sweep: Sweep, consumer: str, num_groups: int, *, reads: bool) -> None:
    """Take, perhaps read, and settle groups as a trainer does: each in a task of its own."""
    take_done, taken = anyio.create_memory_object_stream[list[Delivery]](math.inf)
    read_done, read = anyio.create_memory_object_stream[list[Delivery]](math.inf)

    async def run_take() -> None:
        num_taken = 0
        async with take_done, trainer.consume(trainer.names.trajectories_stream, consumer) as inbox:
            while num_taken < num_groups:
                deliveries = await inbox.fetch(FETCH_MESSAGES, wait_s=5.0)
                num_taken += len(deliveries)
                await take_done.send(deliveries)

    async def run_read() -> None:
        async with read_done, taken:
            async for deliveries in taken:
                placed = _batch_slots(deliveries)
                trajectories, missing, _ = await fetch(trainer, placed) if reads else ({}, {}, {})
                assert not missing
                assert not reads or len(trajectories) == len(placed)
                await read_done.send(deliveries)

    async def run_settle() -> None:
        held: list[Delivery] = []
        async with read:
            async for deliveries in read:
                held += deliveries
                if len(held) >= SETTLE_MESSAGES:
                    await sweep.settle(held)
                    held = []
        await sweep.settle(held)
        await sweep.flush()

    async with anyio.create_task_group() as tasks:
        for work in (run_take, run_read, run_settle):
            tasks.start_soon(work)
    assert not (await trainer.stream_state(trainer.names.trajectories_stream)).num_messages


def _batch_slots(deliveries: list[Delivery]) -> list[BatchSlot]:
    placed: list[BatchSlot] = []
    for delivery in deliveries:
        message = decode_headers(delivery.headers, sequence=delivery.sequence, num_bytes=delivery.num_bytes)
        for slot in message.slots:
            placed.append(
                BatchSlot(
                    position=len(placed),
                    group_id=message.group_id,
                    workflow=message.workflow,
                    item=CutSlot(slot=slot, sequence=delivery.sequence),
                )
            )
    return placed


async def publish_raw(client: Client, subject: str, messages: list[Message]) -> None:
    """Store the same messages with nats-py alone."""
    stream = client.jetstream()

    async def publish(message: Message) -> None:
        payload, headers = message
        await stream.publish(subject, payload, headers=headers, timeout=60)

    await for_each(messages, publish)


async def settle_raw(client: Client, num_groups: int) -> None:
    """Take messages and ack each one, synced, before the next."""
    subscription = await client.jetstream().pull_subscribe_bind(durable=RAW_CONSUMER, stream=RAW_STREAM)
    num_settled = 0
    while num_settled < num_groups:
        for message in await subscription.fetch(FETCH_MESSAGES, timeout=60):
            await message.ack_sync(timeout=60)
            num_settled += 1
    await subscription.unsubscribe()


class Taker:
    """The process that takes and settles, told what by a line of its standard input."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def wait(self) -> None:
        """Return when it is ready for more."""
        await self._stdout.receive_until(READY, 1024)

    async def take(self, whose: str, num_groups: int) -> None:
        """Have it take and settle so many messages."""
        await self._stdin.send(f"{whose} {num_groups}\n".encode())
        await self.wait()


async def run_taker(directory: Path, url: str) -> None:
    """Be that process."""
    settings = bench_settings(directory)
    names = settings.names
    async with AsyncExitStack() as stack:
        trainer = await connect(stack, settings, url, Role.TRAINER)
        raw = await connect_raw(stack, settings, url)
        lineage = await Lineage.take(trainer)
        await lineage.read_log()
        await lineage.write_begin()
        sweep = trainer.sweep(names.trajectories_stream, is_newest=lineage.is_newest)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            whose, num_groups = line.split()
            if whose == "raw":
                await settle_raw(raw, int(num_groups))
            else:
                consumer = names.trainer_consumer(lineage.number)
                await settle_ours(trainer, sweep, consumer, int(num_groups), reads=whose == "reader")
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()


def bench_settings(directory: Path) -> Settings:
    """Return the settings of the run; every other one is as it is by default."""
    return Settings(
        run=RunSettings(name="bench", directory=directory),
        rollout=RolloutSettings(group_size=GROUP_SIZE, min_group_size=1, batch_groups=512),
        bus=BusSettings(max_disk_bytes=8 << 30),
    )


async def connect(stack: AsyncExitStack, settings: Settings, url: str, role: Role) -> Bus:
    """Open a bus until the stack is left."""
    credentials = credentials_path(settings.run_directory, role)
    return await stack.enter_async_context(open_bus(url, names=settings.names, role=role, credentials=credentials))


async def connect_raw(stack: AsyncExitStack, settings: Settings, url: str) -> Client:
    """Connect nats-py alone."""
    client = await nats.connect(
        url,
        nkeys_seed=str(credentials_path(settings.run_directory, Role.OPERATOR)),
        inbox_prefix=Role.OPERATOR.inbox_prefix.encode(),
    )
    stack.push_async_callback(client.close)
    return client


class Bench:
    """The publishing half: a broker with our streams and a raw one of the same limits."""

    def __init__(self, *, num_groups: int, num_bytes: int) -> None:
        self._num_groups = num_groups
        self._num_bytes = num_bytes
        self._num_made = 0

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[None]:
        """Start everything, and end it."""
        settings = bench_settings(directory)
        broker = EmbeddedBroker(settings)
        await broker.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(broker.aclose)
            await declare(await connect(stack, settings, broker.url, Role.OPERATOR), settings)
            self._node = await connect(stack, settings, broker.url, Role.NODE)
            self._receipts = PublishLog(directory, "bench")
            self._raw_subject = f"areal.{settings.names.run}.raw.bench"
            self._raw = await connect_raw(stack, settings, broker.url)
            await declare_raw(self._raw, settings, self._raw_subject)
            command = [sys.executable, "-m", "tools.bench_bus", "--taker-of", broker.url]
            process = await anyio.open_process([*command, "--directory", str(directory)], stderr=None)
            stack.push_async_callback(process.aclose)
            self._taker = Taker(process)
            await self._taker.wait()
            yield

    def groups(self) -> list[Group]:
        """Make groups that nobody has stored yet."""
        self._num_made += self._num_groups
        return make_groups(self._num_groups, num_bytes=self._num_bytes, first=self._num_made)

    async def publish_ours(self) -> float:
        """Return seconds for publishing alone."""
        groups = self.groups()
        duration_s = await seconds(publish_ours(self._node, self._receipts, groups))
        await self._taker.take("ours", self._num_groups)
        return duration_s

    async def publish_raw(self) -> float:
        """Return the same of nats-py."""
        messages = [group.message() for group in self.groups()]
        duration_s = await seconds(publish_raw(self._raw, self._raw_subject, messages))
        await self._taker.take("raw", self._num_groups)
        return duration_s

    async def both_ours(self) -> float:
        """Return seconds for publishing and settling at once."""
        return await self._both_ours("ours")

    async def all_ours(self) -> float:
        """Return seconds for publishing, reading and settling at once."""
        return await self._both_ours("reader")

    async def _both_ours(self, whose: str) -> float:
        groups = self.groups()
        taking = self._taker.take(whose, self._num_groups)
        return await seconds(publish_ours(self._node, self._receipts, groups), taking)

    async def both_raw(self) -> float:
        """Return the same of nats-py."""
        messages = [group.message() for group in self.groups()]
        return await seconds(
            publish_raw(self._raw, self._raw_subject, messages), self._taker.take("raw", self._num_groups)
        )


async def declare_raw(client: Client, settings: Settings, subject: str) -> None:
    """Make the stream and the consumer of nats-py."""
    stream = client.jetstream()
    await stream.add_stream(
        StreamConfig(
            name=RAW_STREAM,
            subjects=[subject],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            duplicate_window=settings.duplicate_window_s,
        )
    )
    consumer = ConsumerConfig(durable_name=RAW_CONSUMER, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1)
    await stream.add_consumer(RAW_STREAM, consumer)


async def seconds(*works: Coroutine[Any, Any, None]) -> float:
    """Run some work at once and return how long all of it took."""

    async def run(work: Coroutine[Any, Any, None]) -> None:
        await work

    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for work in works:
            tasks.start_soon(run, work)
    return time.monotonic() - started


async def measure(arguments: argparse.Namespace) -> bool:
    """Run all rounds, print the table, and say whether both ratios are high enough."""
    bench = Bench(num_groups=arguments.groups, num_bytes=arguments.bytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        async with bench.open(Path(directory)):
            publish = await compare(bench.publish_ours, bench.publish_raw, num_rounds=arguments.rounds)
            both = await compare(bench.both_ours, bench.both_raw, num_rounds=arguments.rounds)
            with_reading = await compare(bench.all_ours, bench.both_raw, num_rounds=arguments.rounds)
    num_trajectories = arguments.groups * GROUP_SIZE
    columns = (publish, both, with_reading)
    print_row("trajectories/s", LEAST_RATIOS)
    for place, name in enumerate(("ours", "raw nats-py")):
        medians_s = [statistics.median(round_[place] for round_ in rounds) for rounds in columns]
        print_row(name, [f"{num_trajectories / median_s:.0f}" for median_s in medians_s])
    every = [[raw_s / ours_s for ours_s, raw_s in rounds] for rounds in columns]
    ratios = [statistics.median(one) for one in every]
    print_row("ratio", [f"{ratio:.2f}" for ratio in ratios])
    print_row("of the rounds", [f"{min(one):.2f}-{max(one):.2f}" for one in every])
    print_row("at least", [f"{least:.2f}" if least else "" for least in LEAST_RATIOS.values()])
    return all(ratio >= least for ratio, least in zip(ratios, LEAST_RATIOS.values(), strict=True))


def print_row(name: str, cells: Iterable[str]) -> None:
    """Print a line of the table."""
    print(f"{name:<16}" + "".join(f"{cell:>16}" for cell in cells))


async def measure_copies(arguments: argparse.Namespace) -> bool:
    """Print publishing to a cluster of three, which keeps as many copies, beside publishing to one broker; True."""
    from tests.clusters import running_cluster

    num_made = 0

    async def publish(bus: Bus, receipts: PublishLog) -> float:
        nonlocal num_made
        num_made += arguments.groups
        groups = make_groups(arguments.groups, num_bytes=arguments.bytes, first=num_made)
        duration_s = await seconds(publish_ours(bus, receipts, groups))
        await operators[bus].api.ask(f"$JS.API.STREAM.PURGE.{bus.names.trajectories_stream}")
        return duration_s

    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        directory = Path(folder)
        settings = bench_settings(directory)
        async with AsyncExitStack() as stack:
            broker = EmbeddedBroker(settings)
            await broker.start()
            stack.push_async_callback(broker.aclose)
            cluster = await stack.enter_async_context(running_cluster(directory, settings.names))
            of_one = await connect(stack, settings, broker.url, Role.OPERATOR)
            of_three = await stack.enter_async_context(cluster.connected(Role.OPERATOR))
            await declare(of_one, settings)
            await declare(of_three, cluster.seen_from(settings, replicas=arguments.replicas))
            one = await connect(stack, settings, broker.url, Role.NODE)
            three = await stack.enter_async_context(cluster.connected(Role.NODE))
            operators = {one: of_one, three: of_three}
            receipts = PublishLog(directory, "bench")
            rounds = await compare(
                lambda: publish(three, receipts), lambda: publish(one, receipts), num_rounds=arguments.rounds
            )
    print_row("trajectories/s", ["publish"])
    for name, durations in zip(("three servers", "one broker"), zip(*rounds, strict=True), strict=True):
        print_row(name, [f"{arguments.groups * GROUP_SIZE / statistics.median(durations):.0f}"])
    ratios = [one_s / three_s for three_s, one_s in rounds]
    print_row("ratio", [f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"])
    return True


async def compare(
    ours: Callable[[], Awaitable[float]], raw: Callable[[], Awaitable[float]], *, num_rounds: int
) -> list[tuple[float, float]]:
    """Return the seconds of both, round by round."""
    rounds = []
    for number in range(num_rounds + 1):
        if number % 2:
            ours_s, raw_s = await ours(), await raw()
        else:
            raw_s, ours_s = await raw(), await ours()
        if number:  # the first warms up
            rounds.append((ours_s, raw_s))
    return rounds


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128, help="messages of one measurement")
    parser.add_argument("--bytes", type=int, default=16 << 10, help="of one trajectory")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--replicas", type=int, default=1, choices=(1, 3), help="3: a cluster beside one broker")
    parser.add_argument("--taker-of", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.taker_of:
        anyio.run(run_taker, arguments.directory, arguments.taker_of, backend_options={"use_uvloop": True})
        return
    measured = measure_copies if arguments.replicas > 1 else measure
    sys.exit(0 if anyio.run(measured, arguments, backend_options={"use_uvloop": True}) else 1)


if __name__ == "__main__":
    main()
