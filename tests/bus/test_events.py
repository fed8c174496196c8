"""What has happened can be read later: as the roles told it, and as the broker told of a run's streams."""

import json

import pytest

from areal_async.bus import Bus, Role, take_trainer_consumer
from areal_async.bus.streams import MAX_EVENTS_BYTES
from areal_async.monitor.snapshot import read_events
from areal_async.protocol.events import GroupDead, RoleLost, ServerFenced
from tests.brokers import OpenRole, until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_events_of_every_role_are_kept_in_their_order_with_who_told_them(open_role: OpenRole) -> None:
    operator, node, trainer = [await open_role(role) for role in (Role.OPERATOR, Role.NODE, Role.TRAINER)]
    state = await operator.stream_state(operator.names.events_stream)

    await node.publish_event(ServerFenced(server_id="7-0", reason="ended by SIGKILL"), instance="7")
    await until(lambda: _has(operator, 1))
    await trainer.publish_event(GroupDead(group_id="0-1-0", reason="KeyError: 'x'"))
    await until(lambda: _has(operator, 2))  # three connections have no order among them
    await operator.publish_event(RoleLost(crew="trainer", reason="trainer-0 ended by SIGKILL", num_starts=1))
    await until(lambda: _has(operator, 3))
    told = await read_events(operator, limit=2)
    everything = await read_events(operator, limit=9)

    assert [(one["teller"], one["event"]) for one in everything] == [
        ("node 7", "server.fenced"), ("trainer 0", "group.dead"), ("operator 0", "role.lost"),
    ]  # fmt: skip
    assert told == everything[1:]
    assert told[0]["reason"] == "KeyError: 'x'"
    assert state.max_bytes == MAX_EVENTS_BYTES


async def test_what_the_broker_tells_of_a_lineages_consumer_is_kept_beside_them(open_role: OpenRole) -> None:
    operator, trainer = await open_role(Role.OPERATOR), await open_role(Role.TRAINER)

    await take_trainer_consumer(trainer, 1)
    await take_trainer_consumer(trainer, 2)
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.*.{operator.names.trajectories_stream}.>"

    async def is_kept() -> bool:
        return len(await operator.read_log(operator.names.events_stream, subject)) >= 3

    await until(is_kept)
    kept = [json.loads(one.data) for one in await operator.read_log(operator.names.events_stream, subject)]
    assert [(one["action"], one["consumer"]) for one in kept] == [
        ("create", "trainer-1"), ("delete", "trainer-1"), ("create", "trainer-2"),
    ]  # fmt: skip
    assert await read_events(operator, limit=9) == [], "they are none of ours, and not shown among them"


async def _has(operator: Bus, num: int) -> bool:
    return len(await read_events(operator, limit=9)) >= num
