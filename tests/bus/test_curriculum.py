"""Under a curriculum the controller passes over what is solved, and one that is killed passes over the same again."""

from pathlib import Path

import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import CurriculumSettings, Settings
from areal_async.controller.controller import Controller
from areal_async.controller.sampler import Sampler
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import Admitted, Cut, CutGroup, CutSlot, GroupId, Slot, SlotStatus, Ticket
from tests.brokers import OpenRole
from tests.bus import admissions
from tests.bus.admissions import dying
from tests.bus.test_controller import World, running

pytestmark = pytest.mark.anyio

NUM_ROWS = 64
IN_FLIGHT = 32


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return admissions.settings_of(tmp_path, "w", in_flight=IN_FLIGHT, curriculum=CurriculumSettings(name="pass_rate"))


@pytest.fixture
async def world(open_role: OpenRole) -> World:
    return await admissions.begin(open_role)


def controller_of(bus: Bus, settings: Settings) -> Controller:
    return admissions.controller_of(bus, settings, num_rows=NUM_ROWS)


async def train(world: World, tickets: list[Ticket], *, step: int) -> None:
    """Cut these groups; the lower half of the rows is always solved, the upper one half of the time."""
    groups = [
        CutGroup(group_id=one.group_id, workflow="w", slots=[_slot(sibling, one) for sibling in (0, 1)])
        for one in tickets
    ]
    await world.trainer.publish(world.trainer.names.cuts, Cut(lineage=1, step=step, groups=groups))
    await world.hold(f"1-{step}")


def _slot(sibling: int, ticket: Ticket) -> CutSlot:
    reward = 1.0 if GroupId.parse(ticket.group_id).index < NUM_ROWS // 2 else float(sibling)
    slot = Slot(sibling=sibling, sample_uid="u", status=SlotStatus.SCORED, reward=reward, oldest="1-0", newest="1-0")
    return CutSlot(slot=slot, sequence=1)


async def first_epoch(open_role: OpenRole, settings: Settings, world: World) -> list[Ticket]:
    """Admit an epoch and train it: what is known then decides about the next."""
    tickets: list[Ticket] = []
    async with running(controller_of(await open_role(Role.CONTROLLER), settings)) as controller:
        for step in (1, 2):
            seen = {one.group_id for one in tickets}
            tickets = await world.tickets(step * IN_FLIGHT, controller)
            await train(world, [one for one in tickets if one.group_id not in seen], step=step)
        return await world.tickets(NUM_ROWS + IN_FLIGHT, controller)


def rows_of(tickets: list[Ticket], *, epoch: int) -> list[int]:
    groups = [GroupId.parse(one.group_id) for one in tickets]
    return [group.index for group in groups if group.epoch == epoch]


async def test_what_is_solved_is_admitted_more_seldom(open_role: OpenRole, settings: Settings, world: World) -> None:
    tickets = await first_epoch(open_role, settings, world)

    record, _ = await (await open_role(Role.OPERATOR)).get(ADMITTED, Admitted)
    assert record is not None
    order = [str(Sampler(NUM_ROWS, seed=1).group_at(position)) for position in range(NUM_ROWS)]
    assert {one.group_id for one in tickets[:NUM_ROWS]} == set(order), "nothing is known in the first epoch"
    rows = rows_of(tickets, epoch=1)
    assert len(rows) == len(set(rows)) == IN_FLIGHT
    num_solved = sum(row < NUM_ROWS // 2 for row in rows)
    assert num_solved < (len(rows) - num_solved) / 2
    assert record.num_skipped > 10
    assert (record.total, record.num_fresh) == (NUM_ROWS + IN_FLIGHT, NUM_ROWS + IN_FLIGHT + record.num_skipped)


async def test_a_controller_killed_between_its_tickets_and_the_record_decides_the_same_again(
    open_role: OpenRole, settings: Settings, world: World, tmp_path: Path
) -> None:
    """Though by then it knows of prompts that were solved meanwhile."""
    # two admissions of the first epoch, the record of what is known, and the tickets of the second epoch
    with dying("before_cursor", 4, tmp_path):
        await first_epoch(open_role, settings, world)
    operator = await open_role(Role.OPERATOR)
    before, _ = await operator.get(ADMITTED, Admitted)
    published = await world.all_tickets()
    assert before is not None
    assert (before.total, len(published)) == (NUM_ROWS, NUM_ROWS + IN_FLIGHT)
    solved = [_slot(1, published[0])]
    groups = [CutGroup(group_id=f"0-{index}-0", workflow="w", slots=solved) for index in range(NUM_ROWS)]
    for _ in range(5):  # of a lineage that is fenced: it trains nothing, and is known
        await world.trainer.publish(world.trainer.names.cuts, Cut(lineage=0, step=0, groups=groups))

    async with running(controller_of(await open_role(Role.CONTROLLER, "1"), settings)) as controller:
        again = await world.tickets(NUM_ROWS + IN_FLIGHT, controller)

    assert again == published
    record, _ = await operator.get(ADMITTED, Admitted)
    assert record is not None
    assert record.total == len(again)
    assert record.known == before.known
