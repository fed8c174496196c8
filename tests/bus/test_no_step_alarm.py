"""A run whose groups all end untrained says so: as an event, and in what its controller answers."""

import anyio
import msgspec
import pytest

from areal_async.bus import Role
from areal_async.config.health import HealthSettings
from areal_async.config.settings import Settings
from areal_async.protocol.events import AlarmCleared, AlarmRaised
from areal_async.protocol.types import CutKind, OutcomeKind
from tests.brokers import PATIENCE_S, OpenRole, until
from tests.bus.test_controller import World, controlling
from tests.bus.test_controller import settings as settings
from tests.bus.test_controller import world as world

pytestmark = pytest.mark.anyio


async def test_it_is_told_when_it_begins_and_when_it_ends_through_a_restart(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    operator = await open_role(Role.OPERATOR)
    settings = settings.model_copy(update={"health": HealthSettings(untrained_batches=2)})
    await world.hold("1-0")

    async with operator.subscribe(f"areal.{operator.names.run}.events.controller.0.alarm.*") as messages:
        async with controlling(open_role, settings) as controller:
            ids = [one.group_id for one in await world.tickets(4, controller)]
            for group in ids:
                await world.outcome(group, OutcomeKind.REJECTED)
            await until(lambda: bool(controller.report()["alarms"]))
        async with controlling(open_role, settings) as controller:
            ids = [one.group_id for one in await world.tickets(8, controller)]
            await world.outcome(ids[4], OutcomeKind.REJECTED)
            await until(lambda: controller.report()["untrained"] == 5)
            await world.cut(CutKind.CUT, 1, ids[5:7])
            with anyio.fail_after(PATIENCE_S):
                told = [await anext(messages) for _ in range(2)]
            assert controller.report()["alarms"] == []

    heard = [msgspec.json.decode(data, type=AlarmRaised | AlarmCleared) for _, data in told]
    assert [(one.kind, one.name, one.step, one.weights_version, one.value, one.bound) for one in heard] == [
        ("alarm.raised", "no_step", 0, "1-0", 4, 4),
        ("alarm.cleared", "no_step", 1, "1-0", 0, 4),
    ]
    assert "(4 rejected; the last: it broke)" in heard[0].sentence
