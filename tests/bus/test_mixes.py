"""The mix of a live run's tasks changes with the next admission; a killed controller admits the same again."""

from collections import Counter
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, Role, ask_service
from areal_async.config.settings import Settings
from areal_async.controller.admission import ADMISSION_BATCH
from areal_async.controller.controller import Controller
from areal_async.errors import FencedError, UserError, leaves_of
from areal_async.protocol.run_state import Change, Changes
from areal_async.protocol.subjects import ADMITTED, CHANGES
from areal_async.protocol.types import Admitted, GroupId, OutcomeKind, Ticket
from tests.brokers import PATIENCE_S, OpenRole, until
from tests.bus import admissions
from tests.bus.admissions import dying
from tests.bus.test_controller import World, running

pytestmark = pytest.mark.anyio

NUM_ROWS = 40
IN_FLIGHT = 12


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return admissions.settings_of(tmp_path, "a", "b", in_flight=IN_FLIGHT)


@pytest.fixture
async def world(open_role: OpenRole) -> World:
    return await admissions.begin(open_role)


def controller_of(bus: Bus, settings: Settings) -> Controller:
    return admissions.controller_of(bus, settings, num_rows=NUM_ROWS)


async def set_ratio(operator: Bus, task: str, ratio: float) -> object:
    change = {"setting": f"tasks.{task}.ratio", "value": ratio}
    return await ask_service(operator, operator.names.control("set"), change, deadline_s=PATIENCE_S)


def with_ratio(settings: Settings, task: int, ratio: float) -> Settings:
    tasks = [one.model_copy(update={"ratio": ratio}) if at == task else one for at, one in enumerate(settings.tasks)]
    return settings.model_copy(update={"tasks": tuple(tasks)})


async def settle(world: World, tickets: list[Ticket]) -> None:
    for one in tickets:
        await world.outcome(one.group_id, OutcomeKind.STALE)


async def go_on(world: World, controller: Controller, seen: list[Ticket]) -> list[Ticket]:
    """Settle what is in flight; return the tickets that take its place."""
    await settle(world, seen[-IN_FLIGHT:])
    return (await world.tickets(len(seen) + IN_FLIGHT, controller))[len(seen) :]


def of(tickets: list[Ticket]) -> Counter[str]:
    return Counter(one.workflow for one in tickets)


async def test_a_change_of_the_mix_holds_from_the_next_admission_on(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    operator = await open_role(Role.OPERATOR)
    async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
        seen = await world.tickets(IN_FLIGHT, controller)
        assert of(seen) == {"a": 6, "b": 6}
        assert controller.report()["shares"] == {"a": 0.5, "b": 0.5}

        assert await set_ratio(operator, "b", 3) == {"tasks.1.ratio": 3}
        second = await go_on(world, controller, seen)
        assert of(second) == {"a": 3, "b": 9}
        assert controller.report()["shares"] == {"a": 0.25, "b": 0.75}

        await set_ratio(operator, "a", 0)
        third = await go_on(world, controller, seen + second)
        assert of(third) == {"b": 12}
        with pytest.raises(UserError, match=r"tasks\.1\.ratio: got 0.* need one over 0"):
            await set_ratio(operator, "b", 0)

    every = seen + second + third
    assert len({one.group_id for one in every}) == len(every)
    record, _ = await operator.get(ADMITTED, Admitted)
    assert record is not None
    assert [(mix.start, mix.weights, mix.counts) for mix in record.mixes] == [(24, [0, 1], [9, 15])]


async def test_what_is_admitted_after_the_answer_goes_by_it_however_late_the_key_is_seen(
    open_role: OpenRole, settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = await open_role(Role.OPERATOR)

    async def see_nothing(controller: Controller) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Controller, "run_changes", see_nothing)
    async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
        seen = await world.tickets(IN_FLIGHT, controller)
        await set_ratio(operator, "a", 0)
        assert of(await go_on(world, controller, seen)) == {"b": IN_FLIGHT}


@pytest.mark.parametrize("is_live", [True, False], ids=["by an operator", "in the file of a resumed run"])
async def test_a_controller_killed_before_its_record_publishes_the_same_again_though_the_mix_has_changed(
    open_role: OpenRole, settings: Settings, world: World, tmp_path: Path, is_live: bool
) -> None:
    """Its tickets have to be counted first: the change holds from the first position that cannot have any."""
    operator = await open_role(Role.OPERATOR)
    # the first mix, the first tickets, those that take their place
    with dying("before_cursor", 3, tmp_path):
        async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
            with anyio.CancelScope(shield=True):
                await settle(world, await world.tickets(IN_FLIGHT, controller))
            await anyio.sleep_forever()
    record, _ = await operator.get(ADMITTED, Admitted)
    assert record is not None
    assert record.num_fresh == IN_FLIGHT
    published = await world.all_tickets()
    assert len(published) > IN_FLIGHT

    bus = await open_role(Role.CONTROLLER, "1")
    if is_live:
        await bus.put(CHANGES, Changes(by_setting={"tasks.0.ratio": Change(value=0, given=1.0)}))
    resumed = settings if is_live else with_ratio(settings, 0, 0.0)
    async with running(controller_of(bus, resumed)) as controller:
        every = await world.tickets(2 * IN_FLIGHT, controller)
        assert every[: len(published)] == published
        while len(every) < 2 * ADMISSION_BATCH:
            every += await go_on(world, controller, every)

    ids = [one.group_id for one in every]
    assert len(set(ids)) == len(ids)
    start = IN_FLIGHT + ADMISSION_BATCH
    assert of(every[:start]) == {"a": start // 2, "b": start // 2}
    assert of(every[start:]) == {"b": len(every) - start}
    record, _ = await operator.get(ADMITTED, Admitted)
    assert record is not None
    assert (record.total, record.num_fresh) == (len(every), len(every))


async def test_a_controller_killed_after_the_mix_was_recorded_goes_on_with_it(
    open_role: OpenRole, settings: Settings, world: World, tmp_path: Path
) -> None:
    operator = await open_role(Role.OPERATOR)
    # the first mix, the first tickets, the other mix
    with dying("after_cursor", 3, tmp_path):
        async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
            seen = await world.tickets(IN_FLIGHT, controller)
            await set_ratio(operator, "a", 0)
            with anyio.CancelScope(shield=True):
                await settle(world, seen)
            await anyio.sleep_forever()
    assert await world.all_tickets() == seen

    async with running(controller_of(await open_role(Role.CONTROLLER, "1"), settings)) as controller:
        every = await world.tickets(2 * IN_FLIGHT, controller)

    assert of(every[IN_FLIGHT:]) == {"b": IN_FLIGHT}


async def test_a_controller_that_begins_has_the_record_to_itself_before_it_publishes(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    """Another one that still lives would put a mix on record from a position of which there is a ticket by now."""
    operator, ended = await open_role(Role.OPERATOR), list[BaseException]()
    older = controller_of(await open_role(Role.CONTROLLER), settings)

    async def run_older() -> None:
        try:
            await older.run()
        except* FencedError as group:
            ended.extend(leaves_of(group))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_older)
        seen = await world.tickets(IN_FLIGHT, older)
        record, _ = before = await operator.get(ADMITTED, Admitted)
        async with running(controller_of(await open_role(Role.CONTROLLER, "1"), settings)) as newer:
            await until(lambda: newer.waits_for.startswith("a credit"))
            taken, revision = await operator.get(ADMITTED, Admitted)
            assert (taken, revision > before[1]) == (record, True)
            every = seen + await go_on(world, newer, seen)
            await until(lambda: bool(ended))

    assert [str(one) for one in ended] == [
        "controller: another controller of this run is admitting; this one must stop"
    ]
    assert len({one.group_id for one in every}) == len(every) == 2 * IN_FLIGHT


async def test_a_resumed_run_goes_by_the_mix_of_its_file_and_each_prompt_has_its_one_turn(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    """Also where an operator had changed it: whoever writes another one into the file has decided anew."""
    operator = await open_role(Role.OPERATOR)
    async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
        every = await world.tickets(IN_FLIGHT, controller)
        await set_ratio(operator, "b", 0)
        every += await go_on(world, controller, every)
    assert of(every) == {"a": 18, "b": 6}

    resumed = with_ratio(settings, 1, 3.0)
    async with running(controller_of(await open_role(Role.CONTROLLER, "1"), resumed)) as controller:
        assert (await world.all_tickets()) == every, "what was admitted stays what it was"
        while len(every) < 2 * NUM_ROWS + ADMISSION_BATCH:
            every += await go_on(world, controller, every)
        assert controller.report()["shares"] == {"a": 0.25, "b": 0.75}

    ids = [one.group_id for one in every]
    assert len(set(ids)) == len(ids)
    start = 2 * IN_FLIGHT + ADMISSION_BATCH
    assert of(every[2 * IN_FLIGHT : start]) == {"a": ADMISSION_BATCH}
    after = of(every[start:])
    assert abs(after["b"] - 3 * after["a"]) <= 4
    for first, task in ((0, "a"), (NUM_ROWS, "b")):
        groups = [GroupId.parse(one.group_id) for one in every if one.workflow == task]
        epochs = Counter(group.epoch for group in groups)
        assert [epochs[epoch] for epoch in range(len(epochs) - 1)] == [NUM_ROWS] * (len(epochs) - 1)
        assert {group.index for group in groups} <= set(range(first, first + NUM_ROWS))


async def test_a_run_of_before_keeps_the_one_order_of_its_tasks_and_says_so(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    bus, operator = await open_role(Role.CONTROLLER), await open_role(Role.OPERATOR)
    await bus.put(ADMITTED, Admitted(total=1, num_fresh=1))
    async with running(controller_of(bus, settings)) as controller:
        await world.tickets(IN_FLIGHT - 1, controller)

        with pytest.raises(UserError, match=r"tasks\.1\.ratio: cannot change in this run: .* one order in common"):
            await set_ratio(operator, "b", 3)
        assert controller.report()["shares"] == {}

    record, _ = await operator.get(ADMITTED, Admitted)
    assert record is not None
    assert not record.mixes
