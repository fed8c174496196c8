"""A run's streams are at another broker as they were: numbers, gaps, keys and what is leased, or not at all."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_async.bus import (
    Bus,
    EmbeddedBroker,
    Role,
    mark_moved,
    move_streams,
    open_bus,
    take_trainer_consumer,
    transfer,
)
from areal_async.bus.streams import all_streams
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import Admitted
from tests.brokers import CONNECT_DEADLINE_S, OpenRole, as_operator, fetch_all, running_broker
from tests.bus.stored import ticket

pytestmark = pytest.mark.anyio

NUM_TICKETS = 40
LARGE = random.Random(1).randbytes(1 << 20)
"""Of many pieces."""


@asynccontextmanager
async def _elsewhere(settings: Settings, folder: Path) -> AsyncIterator[tuple[EmbeddedBroker, Bus]]:
    """Another broker, which knows nothing of the run."""
    other = settings.model_copy(update={"run": settings.run.model_copy(update={"directory": folder})})
    async with running_broker(other) as broker, as_operator(broker, other) as bus:
        yield broker, bus


async def _fill(open_role: OpenRole) -> None:
    """Have a run with gaps in its streams, prompts that are leased, and keys with a history."""
    controller, node, trainer = [await open_role(role) for role in (Role.CONTROLLER, Role.NODE, Role.TRAINER)]
    names = controller.names
    for index in range(NUM_TICKETS):
        await controller.publish(names.tickets("w"), ticket(f"0-{index}-0", group_size=2), msg_id=f"t{index}")
        await controller.put(ADMITTED, Admitted(total=index))
    async with node.consume(names.tickets_stream, names.nodes_consumer) as inbox:
        for delivery in (await fetch_all(inbox, 10))[::2]:
            await delivery.ack()
    await take_trainer_consumer(trainer, 3)
    for number in range(4):
        await node.api.store(names.trajectories("w", f"0-{number}-0"), LARGE)


async def test_all_is_at_the_other_broker_and_goes_on_from_there(
    open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    await _fill(open_role)
    operator = await open_role(Role.OPERATOR)

    async with _elsewhere(settings, tmp_path / "other") as (broker, target):
        moved = await move_streams(operator, target, settings)

        names = target.names
        assert [one.name for one in moved] == all_streams(names)
        numbers = {one.name: one.num_messages for one in moved}
        assert (numbers[names.tickets_stream], numbers[names.trajectories_stream]) == (NUM_TICKETS - 5, 4)
        assert await target.get(ADMITTED, Admitted) == await operator.get(ADMITTED, Admitted)
        assert (await target.stream_state(names.tickets_stream)).last_sequence == NUM_TICKETS
        key = broker.credentials(Role.NODE)
        async with (
            open_bus(
                broker.url, names=names, role=Role.NODE, credentials=key, connect_deadline_s=CONNECT_DEADLINE_S
            ) as node,
            node.consume(names.tickets_stream, names.nodes_consumer) as inbox,
        ):
            (delivery,) = await fetch_all(inbox, 1)
        assert delivery.subject == names.tickets("w"), "the first that nobody had leased"
        with pytest.raises(UserError, match="AREAL_test_TICKETS already; remove its streams there"):
            await move_streams(operator, target, settings)


async def test_what_does_not_arrive_as_it_was_is_taken_away_again_and_stays_where_it_was(
    open_role: OpenRole, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _fill(open_role)
    operator = await open_role(Role.OPERATOR)
    names, move = operator.names, transfer._move

    async def move_and_lose(source: Bus, target: Bus, stream: str) -> None:
        await move(source, target, stream)
        if stream == names.trajectories_stream:
            await target.api.ask(f"$JS.API.STREAM.PURGE.{stream}", {"seq": 2})

    monkeypatch.setattr(transfer, "_move", move_and_lose)
    async with _elsewhere(settings, tmp_path / "other") as (_, target):
        with pytest.raises(BusError, match="stream AREAL_test_TRAJECTORIES: messages is 4 here, and 3 there"):
            await move_streams(operator, target, settings)
        assert (await target.api.ask("$JS.API.STREAM.NAMES"))["streams"] is None
        monkeypatch.undo()
        copies = settings.model_copy(update={"bus": settings.bus.model_copy(update={"replicas": 3})})
        with pytest.raises(UserError, match="bus.replicas: got 3, and the broker has not so many servers"):
            await move_streams(operator, target, copies)
        await move_streams(operator, target, settings)


async def test_no_broker_serves_a_store_that_was_left(settings: Settings) -> None:
    async with running_broker(settings):
        pass
    mark_moved(settings.run_directory, "nats://b:4222")

    with pytest.raises(UserError, match="run test: it was moved to nats://b:4222, and .* is what it left"):
        await EmbeddedBroker(settings).start()
