"""Back-pressure (P8): admission stops where the trainer is slow; a stream too small for what is admitted stops nothing.

The real controller, outboxes, feed and broker; only sampling and arithmetic are left out.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, Role, declare
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.tasks import Tasks
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import Admitted, CutKind, Outcome, OutcomeKind, Ticket, WeightsVersion
from areal_async.protocol.wire import decode
from areal_async.rollout import backpressure, publish
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import fetch, slots_of
from areal_async.trainer.batch.reader import JournalReader
from tests.brokers import OpenRole, until
from tests.bus.stored import giant

pytestmark = pytest.mark.anyio

GROUP_SIZE = 4
NUM_STEPS = 4
TRAJECTORY_BYTES = 64 << 10


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(backpressure, "MAX_FULL_WAIT_S", 0.2)
    monkeypatch.setattr(publish, "FLUSH_DEADLINE_S", 0.1)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=NUM_STEPS),
        rollout=RolloutSettings(
            group_size=GROUP_SIZE, min_group_size=GROUP_SIZE, batch_groups=4, max_staleness=1,
            max_trajectory_bytes=TRAJECTORY_BYTES + 4096, max_stream_bytes=1 << 20,
        ),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )  # fmt: skip


class Nodes:
    """Every ticket's siblings finish one after the other, and those of all groups in turn: none is whole soon."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._publish_log = PublishLog(settings.run_directory, "a")
        self.backpressure = Backpressure()
        self.has_waited = False

    async def run(self) -> None:
        names = self._bus.names
        async with (
            anyio.create_task_group() as groups,
            self._bus.consume(names.tickets_stream, names.nodes_consumer) as inbox,
        ):
            while True:
                for delivery in await inbox.fetch(16, wait_s=2.0):
                    await delivery.ack()
                    groups.start_soon(self._run_group, decode(delivery.data, Ticket))

    async def _run_group(self, ticket: Ticket) -> None:
        outbox = Outbox(
            self._bus, ticket, producer="a", num_expected=GROUP_SIZE, linger_s=0.0,
            backpressure=self.backpressure, publish_log=self._publish_log,
        )  # fmt: skip
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run)
            for sibling in range(GROUP_SIZE):
                outbox.put(giant(ticket.group_id, sibling, num_bytes=TRAJECTORY_BYTES, version=ticket.version))
                await until(lambda left=GROUP_SIZE - sibling - 1: self._is_stored(outbox, left))  # type: ignore[misc]

    def _is_stored(self, outbox: Outbox, num_left: int) -> bool:
        self.has_waited |= self.backpressure.num_waiting > 0
        return outbox.num_left <= num_left


class Training:
    """A trainer's rank 0, and a server that holds each version as soon as it is there."""

    def __init__(self, bus: Bus, node: Bus, feed: BatchFeed, reader: JournalReader) -> None:
        self._bus, self._node, self._feed, self._reader = bus, node, feed, reader
        self.trained: Counter[tuple[str, int]] = Counter()

    async def hold(self, step: int) -> None:
        await self._bus.put(self._bus.names.weights_key(), WeightsVersion(version=f"1-{step}", path="x"))
        state = ServerState(server_id="s", node_id="n", url="", version=f"1-{step}")
        await self._node.put(self._node.names.server_key("s"), state)

    async def train(self) -> None:
        """Train every step; checkpoint at the end, or when the journal asks for it."""
        step, is_checkpointed = 1, False
        while step <= NUM_STEPS:
            self._feed.allow(step + 1)
            entry = await self._reader.next_entry(step, is_checkpointed=is_checkpointed)
            assert entry is not None
            is_checkpointed = entry.kind is CutKind.CHECKPOINT
            if is_checkpointed:
                await self._feed.on_checkpoint(step - 1)
                self._feed.notify()
                continue
            found, missing, _ = await fetch(self._bus, slots_of(entry))
            assert not missing
            assert len(found) == sum(len(group.slots) for group in entry.groups)
            self.trained.update((group.group_id, item.slot.sibling) for group in entry.groups for item in group.slots)
            await self.hold(step)
            step += 1
        await self._feed.on_checkpoint(NUM_STEPS)


@asynccontextmanager
async def running(open_role: OpenRole, settings: Settings) -> AsyncIterator[tuple[Training, Nodes, Controller]]:
    node, trainer, bus = [await open_role(role) for role in (Role.NODE, Role.TRAINER, Role.CONTROLLER)]
    lineage = await Lineage.take(trainer)
    journal = await lineage.read_log()
    sequence = await lineage.write_begin()
    reader = JournalReader(trainer, lineage=lineage.number, restored_step=0)
    feed = BatchFeed(trainer, settings, lineage, journal)
    accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
    controller = Controller(bus, settings, Tasks([("w", [{}] * 100)]), None, accounts=accounts)
    nodes = Nodes(node, settings)
    training = Training(trainer, node, feed, reader)
    async with anyio.create_task_group() as loops:
        loops.start_soon(reader.run)
        await reader.read_through(sequence)
        for loop in (feed.run_inbox, feed.run_tickets, controller.run, nodes.run):
            loops.start_soon(loop)
        loops.start_soon(feed.run_journal, 1)
        await training.hold(0)
        yield training, nodes, controller
        loops.cancel_scope.cancel()


async def test_a_trainer_that_stands_still_stops_admission_at_the_credit(
    open_role: OpenRole, settings: Settings
) -> None:
    ample = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"max_stream_bytes": 64 << 20})})
    operator = await open_role(Role.OPERATOR)
    await declare(operator, ample)
    bound = settings.rollout.max_groups_in_flight
    async with running(open_role, ample) as (_, _, controller):

        async def num_bytes() -> int:
            return (await operator.stream_state(operator.names.trajectories_stream)).num_bytes

        async def is_all_stored() -> bool:
            return await num_bytes() >= bound * GROUP_SIZE * TRAJECTORY_BYTES * 0.99

        await until(is_all_stored)
        await until(lambda: controller.waits_for == f"a credit: {bound} groups are admitted and not settled")

        admitted, _ = await operator.get(ADMITTED, Admitted)
        assert admitted is not None
        assert admitted.total == bound
        assert await num_bytes() <= bound * GROUP_SIZE * ample.rollout.max_trajectory_bytes


@pytest.mark.timeout(300)
async def test_a_stream_for_half_of_what_is_admitted_neither_stops_the_run_nor_loses_anything(
    open_role: OpenRole, settings: Settings
) -> None:
    operator = await open_role(Role.OPERATOR)
    async with running(open_role, settings) as (training, nodes, _):
        with anyio.fail_after(250):
            await training.train()

    assert nodes.has_waited, "the stream was to be full"
    assert max(training.trained.values()) == 1
    names = operator.names
    outcomes = [decode(one.data, Outcome) for one in await operator.read_log(names.outcomes_stream, names.outcomes)]
    kinds = {one.group_id: one.kind for one in outcomes if one.kind.settles}
    trained = {group_id for group_id, _ in training.trained}
    assert trained == {group_id for group_id, kind in kinds.items() if kind is OutcomeKind.TRAINED}
    given_up = [one.reason for one in outcomes if one.kind is OutcomeKind.ABANDONED]
    assert given_up
    assert all(reason.startswith("the stream was full") for reason in given_up)
