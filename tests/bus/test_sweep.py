"""Settled messages leave the stream by one purge, which takes nothing else; acks where a purge would not be safe."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from areal_async.bus import Bus, Delivery, EmbeddedBroker, Inbox, Role
from areal_async.bus.connection import ConnectionLostError
from areal_async.bus.sweep import FEW, Sweep
from areal_async.config.settings import Settings
from areal_async.trainer.batch.lineage import Lineage
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, kill, until
from tests.bus.stored import store
from tests.bus.test_feed import num_stored, running, with_room_for

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
MANY = 4 * FEW


async def publish(bus: Bus, count: int, *, first: int = 0) -> None:
    for index in range(first, first + count):
        await bus.publish(bus.names.trajectories("w", f"0-{index}-0"), b"payload", headers={"Areal-X": "y"})


async def begin(trainer: Bus) -> Lineage:
    lineage = await Lineage.take(trainer)
    await lineage.read_log()
    await lineage.write_begin()
    return lineage


def sweep_of(lineage: Lineage, bus: Bus) -> Sweep:
    return bus.sweep(bus.names.trajectories_stream, is_newest=lineage.is_newest)


@asynccontextmanager
async def receiving(bus: Bus, lineage: Lineage) -> AsyncIterator[Inbox]:
    names = bus.names
    async with bus.consume(names.trajectories_stream, names.trainer_consumer(lineage.number)) as inbox:
        yield inbox


async def state(bus: Bus, lineage: Lineage) -> tuple[int, int]:
    """How many messages are stored, and how many the lineage's consumer waits for the end of."""
    names = bus.names
    stored = await bus.stream_state(names.trajectories_stream)
    return stored.num_messages, await bus.num_unsettled(
        names.trajectories_stream, names.trainer_consumer(lineage.number)
    )


@pytest.fixture
def ack_deadline_s() -> float:
    """How long an ack's confirmation is waited for."""
    return PATIENCE_S


@pytest.fixture
def acked(monkeypatch: pytest.MonkeyPatch, ack_deadline_s: float) -> list[int]:
    """The sequences that were acked, one by one."""
    sequences: list[int] = []
    send: Callable[[Delivery, bytes], Awaitable[None]] = Delivery._send
    request: Callable[..., Awaitable[bool]] = Delivery.ack_sync

    async def ack(self: Delivery, body: bytes) -> None:
        sequences.append(self.sequence)
        await send(self, body)

    async def ack_sync(self: Delivery, deadline_s: float = 0.0) -> bool:
        sequences.append(self.sequence)
        return await request(self, ack_deadline_s)

    monkeypatch.setattr("areal_async.bus.sweep.TRY_DEADLINE_S", PATIENCE_S)
    monkeypatch.setattr(Delivery, "_send", ack)
    monkeypatch.setattr(Delivery, "ack_sync", ack_sync)
    return sequences


async def test_a_purge_survives_the_death_of_the_broker_and_what_comes_later_is_delivered(
    broker: EmbeddedBroker, open_role: OpenRole, acked: list[int]
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    lineage = await begin(trainer)
    await publish(node, MANY)
    async with receiving(trainer, lineage) as inbox:
        deliveries = await fetch_all(inbox, MANY)

        await sweep_of(lineage, trainer).settle(deliveries)
        kill(broker)

        assert (len(deliveries), acked) == (MANY, [MANY])
        assert await state(trainer, lineage) == (0, 0)
        await publish(node, 2, first=MANY)
        later = await fetch_all(inbox, 2)
    assert [delivery.sequence for delivery in later] == [MANY + 1, MANY + 2]


async def test_what_is_open_or_not_received_ends_the_purge_and_stays(open_role: OpenRole, acked: list[int]) -> None:
    node, trainer, operator = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    lineage = await begin(trainer)
    sweep = sweep_of(lineage, trainer)
    await publish(node, 3 * MANY)
    async with receiving(trainer, lineage) as inbox:
        deliveries = await fetch_all(inbox, 3 * MANY - 1)
        await operator.api.ask(f"$JS.API.STREAM.MSG.DELETE.{trainer.names.trajectories_stream}", {"seq": 3})
        del deliveries[2]
        unknown = deliveries.pop(MANY - 1)  # as if it was still on its way
        await sweep.settle(deliveries)

        assert (await state(trainer, lineage), acked) == ((2 * MANY, 2 * MANY), [MANY])
        assert await trainer.get_message(trainer.names.trajectories_stream, unknown.sequence) is not None
        assert sweep.num_messages == 2 * MANY - 2

        await sweep.settle([unknown])
        assert (await state(trainer, lineage), acked[1:]) == ((1, 1), [3 * MANY - 1])  # one was not received
        assert (sweep.num_messages, sweep.num_bytes) == (0, 0)


async def test_while_nothing_more_is_settled_the_broker_is_asked_nothing_about_what_is_held_back(
    open_role: OpenRole,
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    lineage = await begin(trainer)
    num_looks = 0

    async def is_newest() -> bool:
        nonlocal num_looks
        num_looks += 1
        return await lineage.is_newest()

    sweep = trainer.sweep(trainer.names.trajectories_stream, is_newest=is_newest)
    await publish(node, MANY + 1)
    async with receiving(trainer, lineage) as inbox:
        still_open, *deliveries = await fetch_all(inbox, MANY + 1)
        await sweep.settle(deliveries)
        for _ in range(3):
            await sweep.settle([])
        assert (sweep.num_messages, num_looks) == (MANY, 1)

        await sweep.settle([still_open])
    assert (sweep.num_messages, num_looks) == (0, 2)
    assert (await state(trainer, lineage))[0] == 0


async def test_what_is_held_back_behind_an_open_message_is_acked_where_room_is_needed(
    open_role: OpenRole, acked: list[int]
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    lineage = await begin(trainer)
    sweep = sweep_of(lineage, trainer)
    await publish(node, MANY)
    async with receiving(trainer, lineage) as inbox:
        open_one, *rest = await fetch_all(inbox, MANY)
        await sweep.settle(rest)
        assert (await state(trainer, lineage), acked) == ((MANY, MANY), [])
        assert sweep.num_bytes == sum(delivery.stored_bytes for delivery in rest)

        await sweep.flush()

        assert sorted(acked) == [delivery.sequence for delivery in rest]
        assert await state(trainer, lineage) == (1, 1)
        assert await trainer.get_message(trainer.names.trajectories_stream, open_one.sequence) is not None


async def test_a_trainer_acks_what_it_held_back_when_its_stream_has_filled(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    num_groups = FEW // 2 + 1
    rollout = settings.rollout.model_copy(update={"group_size": 2, "min_group_size": 2, "batch_groups": num_groups})
    settings = with_room_for(settings.model_copy(update={"rollout": rollout}), 2 * num_groups + 1)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        await store(node, "0-9-0", [0], group_size=2)  # the oldest, and open
        for index in range(num_groups):
            for sibling in (0, 1):
                await store(node, f"0-{index}-0", [sibling], group_size=2)
        await station.cut(1)
        await station.feed.on_checkpoint(1)
        assert await num_stored(trainer) == 2 * num_groups + 1

        for index in (10, 11, 12):  # more than there is room for
            await store(node, f"0-{index}-0", [0], group_size=2)

        async def has_room() -> bool:
            return await num_stored(trainer) == 4

        await until(has_room)


async def test_a_zombie_purges_nothing(open_role: OpenRole) -> None:
    node, trainer, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER)
    zombie = await begin(trainer)
    await publish(node, MANY)
    async with receiving(trainer, zombie) as inbox:
        deliveries = await fetch_all(inbox, MANY)
        newer = await begin(second)

        await sweep_of(zombie, trainer).settle(deliveries)

    assert await state(second, newer) == (MANY, MANY)


@pytest.mark.parametrize("ack_deadline_s", [0.5])  # a broker that was killed confirms nothing that it has forgotten
@pytest.mark.parametrize("when", ["before", "while"])
async def test_over_a_connection_that_broke_messages_are_acked_instead(
    broker: EmbeddedBroker, open_role: OpenRole, acked: list[int], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    lineage = await begin(trainer)
    await publish(node, MANY)
    purges: list[str] = []
    request = trainer.connection.request

    async def cut_off(subject: str, *args: object, **kwargs: object) -> object:
        if "PURGE" in subject:
            purges.append(subject)
            raise ConnectionLostError("no answer")
        return await request(subject, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.connection, "request", cut_off)
    async with receiving(trainer, lineage) as inbox:
        deliveries = await fetch_all(inbox, MANY)
        if when == "before":
            kill(broker)
            await trainer.stream_state(trainer.names.trajectories_stream)  # it is back

        await sweep_of(lineage, trainer).settle(deliveries)

        assert {delivery.sequence for delivery in deliveries} <= set(acked)
        assert len(purges) == (when == "while")
        with anyio.fail_after(PATIENCE_S):
            while await state(trainer, lineage) != (0, 0):  # what the killed broker forgot it delivered comes again
                await sweep_of(lineage, trainer).settle(await inbox.fetch(MANY, wait_s=0.2))
