"""What durability costs: our publishing and settling of trajectories beside raw nats-py, on the same broker.

    python -m tools.bench_bus                            # 16 KB trajectories, groups of 16, `sync_interval: always`

Every figure is trajectories per second over the same messages (a group's sixteen travel in one):

publish          ours: an outbox per group; raw: `js.publish` of ready-made messages, as many at once
publish+settle   one client publishes while another takes what comes and acks it. Ours: headers by the consumer, every
                 payload by direct get and its checksum verified, acks settled in bulk; raw: `fetch` and one
                 `ack_sync` for each message

Rounds alternate and the medians are compared. Exits with 1 below 0.8 for the first ratio or 1.2 for the second.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import nats
import numpy as np
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from areal_async.bus import Bus, Delivery, EmbeddedBroker, Role, declare, open_bus, take_trainer_consumer
from areal_async.receipts import Receipts
from areal_async.rollout.publish import Backpressure, Outbox
from areal_async.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.trainer.payloads import Placed, fetch
from areal_async.types import CutSlot, Sequence, Slot, SlotStatus, Ticket, Trajectory
from areal_async.wire import decode_headers, encode_message

WORKFLOW = "bench"
GROUP_SIZE = 16
BYTES_PER_TOKEN = 4 + 1 + 4 + 8
"""Token id, mask, logprob and version."""
NUM_PUBLISHING = 32
"""Groups published at once, 8 MB of messages."""
FETCH_MESSAGES = 32
RAW_STREAM = "RAW"
RAW_CONSUMER = "raw"
LEAST_PUBLISH_RATIO = 0.8
LEAST_BOTH_RATIO = 1.2


T = TypeVar("T")
Message = tuple[bytes, dict[str, str]]
"""Payload and headers."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sixteen trajectories and the message that they make."""

    ticket: Ticket
    trajectories: list[Trajectory]

    def message(self) -> Message:
        """Encode them as an outbox does, for whoever has no outbox."""
        payload, headers = encode_message(
            self.trajectories,
            group_id=self.ticket.group_id,
            workflow=WORKFLOW,
            ticket_version=self.ticket.version,
            num_failed_attempts=0,
            group_size=GROUP_SIZE,
        )
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
                        versions=np.zeros(num_tokens, dtype=np.int64),
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


async def publish_ours(node: Bus, receipts: Receipts, groups: list[Group]) -> None:
    """Store groups as a node does."""
    backpressure = Backpressure()

    async def publish(group: Group) -> None:
        outbox = Outbox(
            node,
            node.names,
            group.ticket,
            producer="bench",
            num_expected=GROUP_SIZE,
            linger_s=0.0,
            backpressure=backpressure,
            receipts=receipts,
        )
        for trajectory in group.trajectories:
            outbox.put(trajectory)
        await outbox.run()

    await for_each(groups, publish)


async def settle_ours(trainer: Bus, consumer: str, num_groups: int) -> None:
    """Take, verify and settle groups as a trainer does."""
    num_settled = 0
    async with trainer.consume(trainer.names.trajectories_stream, consumer) as inbox:
        while num_settled < num_groups:
            deliveries = await inbox.fetch(FETCH_MESSAGES, wait_s=5.0)
            trajectories, missing = await fetch(trainer, _placed(deliveries))
            assert len(trajectories) == GROUP_SIZE * len(deliveries)
            assert not missing
            assert not await trainer.settle(deliveries)
            num_settled += len(deliveries)


def _placed(deliveries: list[Delivery]) -> list[Placed]:
    placed: list[Placed] = []
    for delivery in deliveries:
        message = decode_headers(delivery.headers, sequence=delivery.sequence, num_bytes=delivery.num_bytes)
        for slot in message.slots:
            placed.append(
                Placed(
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


class Bench:
    """One broker, and on it our streams and a raw one with the same limits."""

    def __init__(self, *, num_groups: int, num_bytes: int) -> None:
        self._num_groups = num_groups
        self._num_bytes = num_bytes
        self._num_made = 0
        self._stack = AsyncExitStack()

    async def open(self, directory: Path) -> AsyncExitStack:
        """Start everything; leaving the returned stack ends it."""
        settings = Settings(
            run=RunSettings(name="bench", directory=directory),
            rollout=RolloutSettings(group_size=GROUP_SIZE, min_group_size=1, batch_groups=4 * self._num_groups),
            bus=BusSettings(max_disk_bytes=8 << 30),
        )
        stack, names = self._stack, settings.names
        broker = EmbeddedBroker(settings)
        await broker.start()
        stack.push_async_callback(broker.aclose)

        async def connect(role: Role) -> Bus:
            return await stack.enter_async_context(
                open_bus(broker.url, names=names, role=role, credentials=broker.credentials(role))
            )

        await declare(await connect(Role.OPERATOR), settings)
        self._node, self._trainer = await connect(Role.NODE), await connect(Role.TRAINER)
        self._consumer = await take_trainer_consumer(self._trainer, 1)
        self._receipts = Receipts(directory, "bench")
        self._raw_subject = f"areal.{names.run}.raw.bench"
        self._raw_clients = [await self._connect_raw(broker) for _ in range(2)]
        stream = self._raw_clients[0].jetstream()
        await stream.add_stream(
            StreamConfig(
                name=RAW_STREAM,
                subjects=[self._raw_subject],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                duplicate_window=settings.duplicate_window_s,
            )
        )
        consumer = ConsumerConfig(durable_name=RAW_CONSUMER, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1)
        await stream.add_consumer(RAW_STREAM, consumer)
        return stack

    async def _connect_raw(self, broker: EmbeddedBroker) -> Client:
        client = await nats.connect(
            broker.url,
            nkeys_seed=str(broker.credentials(Role.OPERATOR)),
            inbox_prefix=Role.OPERATOR.inbox_prefix.encode(),
        )
        self._stack.push_async_callback(client.close)
        return client

    def groups(self) -> list[Group]:
        """Make groups that nobody has stored yet."""
        self._num_made += self._num_groups
        return make_groups(self._num_groups, num_bytes=self._num_bytes, first=self._num_made)

    async def ours(self) -> tuple[float, float]:
        """Return seconds for publishing alone, and for publishing and settling at once."""
        node, trainer, consumer, count = self._node, self._trainer, self._consumer, self._num_groups
        receipts = self._receipts
        groups = self.groups()
        publish_s = await seconds(publish_ours(node, receipts, groups))
        await settle_ours(trainer, consumer, count)
        groups = self.groups()
        return publish_s, await seconds(publish_ours(node, receipts, groups), settle_ours(trainer, consumer, count))

    async def raw(self) -> tuple[float, float]:
        """Return the same of nats-py."""
        (publisher, taker), subject, count = self._raw_clients, self._raw_subject, self._num_groups
        messages = [group.message() for group in self.groups()]
        publish_s = await seconds(publish_raw(publisher, subject, messages))
        await settle_raw(taker, count)
        messages = [group.message() for group in self.groups()]
        return publish_s, await seconds(publish_raw(publisher, subject, messages), settle_raw(taker, count))


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
    results: dict[str, list[tuple[float, float]]] = {"ours": [], "raw nats-py": []}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        async with await bench.open(Path(directory)):
            for number in range(arguments.rounds + 1):
                ours, raw = await bench.ours(), await bench.raw()
                if number:  # the first warms up
                    results["ours"].append(ours)
                    results["raw nats-py"].append(raw)
    per_round = arguments.groups * GROUP_SIZE
    rates = {
        name: [per_round / statistics.median(round_[place] for round_ in rounds) for place in (0, 1)]
        for name, rounds in results.items()
    }
    print(f"{'trajectories/s':<16}{'publish':>10}{'publish+settle':>16}")
    for name, (publish, both) in rates.items():
        print(f"{name:<16}{publish:>10.0f}{both:>16.0f}")
    ratios = [rates["ours"][place] / rates["raw nats-py"][place] for place in (0, 1)]
    print(f"{'ratio':<16}{ratios[0]:>10.2f}{ratios[1]:>16.2f}")
    print(f"{'at least':<16}{LEAST_PUBLISH_RATIO:>10.2f}{LEAST_BOTH_RATIO:>16.2f}")
    return all(ratio >= least for ratio, least in zip(ratios, (LEAST_PUBLISH_RATIO, LEAST_BOTH_RATIO), strict=True))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256, help="messages of one measurement")
    parser.add_argument("--bytes", type=int, default=16 << 10, help="of one trajectory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    is_fast_enough: bool = anyio.run(measure, parser.parse_args(), backend_options={"use_uvloop": True})
    sys.exit(0 if is_fast_enough else 1)


if __name__ == "__main__":
    main()
