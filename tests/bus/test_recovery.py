"""A node that ended itself for a slot: the next one stores that slot as failed before it leases anything."""

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.config.settings import Settings
from areal_async.launch.blockages import excuse_for, run_blockages
from areal_async.launch.process_group import Death
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import Outcome, OutcomeKind, Slot, Ticket
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.recovery import recover, row_key
from areal_async.rollout.user_code.loop_block_report import (
    ENDED_BY_WATCH,
    ENDED_FOR_CULPRIT,
    LoopBlock,
    LoopBlockFile,
    Work,
)
from tests.brokers import OpenRole, fetch_all, until
from tests.unit.rollout.byte_model import ScriptedModel, codec

pytestmark = pytest.mark.anyio

TICKET = Ticket(group_id="0-3-0", workflow="w", row={"question": "q"}, group_size=4, version="1-2")
ROW = EvalTicket(eval_id="1-2", index=7, workflow="w", row={}, attempt=1, sample=3)
PLACE = "w.py:12 look"


@pytest.fixture
def file(settings: Settings) -> LoopBlockFile:
    return LoopBlockFile(settings.run_directory, "0")


@pytest.fixture
async def place(broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> NodeContext:
    return NodeContext(
        settings=settings,
        bus=await open_role(Role.NODE),
        node_id="0",
        generator=ScriptedModel(),
        codec=codec(),
        workflows={},
    )


def held_up_by(sibling: int, uid: str = "uid") -> LoopBlock:
    work = Work(
        workflow="w", name=f"slot 0-3-0.{sibling}", ticket=TICKET, sibling=sibling, sample_uid=f"{uid}.{sibling}"
    )
    return LoopBlock(node_id="0", blocked_s=21.4, place=PLACE, work=work)


async def stored(bus: Bus) -> list[Slot]:
    messages = await bus.read_log(bus.names.trajectories_stream, bus.names.trajectories("w", "0-3-0"))
    found = [
        slot
        for message in messages
        for slot in wire.decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data)).slots
    ]
    return sorted(found, key=lambda slot: slot.sibling)


async def test_the_slot_that_held_up_the_loop_is_stored_as_failed_once(
    place: NodeContext, file: LoopBlockFile, open_role: OpenRole
) -> None:
    operator = await open_role(Role.OPERATOR)
    file.write(held_up_by(2))

    assert await recover(place, file) == set()
    file.write(held_up_by(2))  # as if the node had ended before it could remove it
    await recover(place, file)

    (slot,) = await stored(operator)
    assert (slot.sibling, slot.status, slot.oldest) == (2, "failed", "1-2")
    assert slot.reason.startswith(f"workflow w: held up the event loop of node 0 for 21 s, at {PLACE}; await, or call")
    assert file.read() is None


async def test_the_second_sibling_that_does_so_takes_the_rest_of_its_group_along(
    place: NodeContext, file: LoopBlockFile, open_role: OpenRole
) -> None:
    for sibling in (2, 0):
        file.write(held_up_by(sibling))
        await recover(place, file)

    slots = await stored(await open_role(Role.OPERATOR))
    assert [slot.sibling for slot in slots] == [0, 1, 2, 3]
    assert all(slot.status == "failed" and PLACE in slot.reason for slot in slots)
    assert [slot.reason.startswith("workflow w: not run, as two siblings") for slot in slots] == [
        False,
        True,
        False,
        True,
    ]


async def test_a_workflow_of_all_siblings_takes_its_group_along_the_second_time(
    place: NodeContext, file: LoopBlockFile, open_role: OpenRole
) -> None:
    for uid in ("first", "second"):
        file.write(held_up_by(0, uid))
        await recover(place, file)

    slots = await stored(await open_role(Role.OPERATOR))
    assert [(slot.sibling, slot.status) for slot in slots] == [(sibling, "failed") for sibling in range(4)]


async def test_nothing_is_stored_for_a_group_that_is_settled(
    place: NodeContext, file: LoopBlockFile, open_role: OpenRole
) -> None:
    controller = await open_role(Role.CONTROLLER)
    outcome = Outcome(group_id="0-3-0", kind=OutcomeKind.ABANDONED, lineage=1)
    await controller.publish(place.bus.names.outcomes, outcome, msg_id="outcome")
    file.write(held_up_by(2))

    await recover(place, file)

    assert await stored(await open_role(Role.OPERATOR)) == []
    assert file.read() is None


async def test_a_held_out_row_that_does_so_has_its_result_and_need_only_be_acknowledged(
    place: NodeContext, file: LoopBlockFile, open_role: OpenRole
) -> None:
    work = Work(workflow="w", name="row 1-2.7", eval_ticket=ROW)
    file.write(LoopBlock(node_id="0", blocked_s=20.2, place=PLACE, work=work))

    assert await recover(place, file) == {row_key(ROW)}

    controller = await open_role(Role.CONTROLLER)
    names = controller.names
    async with controller.consume(names.eval_stream, names.eval_controller_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
        result = await controller.decode(delivery, EvalResult)
    assert result is not None
    assert (result.eval_id, result.index, result.sample) == ("1-2", 7, 3)
    assert "held up the event loop" in result.error


async def test_without_a_culprit_there_is_nothing_to_store(place: NodeContext, file: LoopBlockFile) -> None:
    assert await recover(place, file) == set()
    file.write(LoopBlock(node_id="0", blocked_s=20.2, place=PLACE))

    assert await recover(place, file) == set()
    assert file.read() is None


async def test_the_user_is_told_of_each_loop_that_stands_still_once(settings: Settings, file: LoopBlockFile) -> None:
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_blockages, settings.run_directory, told.append)
        await anyio.wait_all_tasks_blocked()
        file.write(held_up_by(2))
        await until(lambda: bool(told))
        LoopBlockFile(settings.run_directory, "1").write(LoopBlock(node_id="1", blocked_s=20.2, place=PLACE))
        await until(lambda: told[-1].endswith(f"event loop of node 1, at {PLACE}"))
        tasks.cancel_scope.cancel()

    assert len(told) == 2
    assert told[0] == f"workflow w, slot 0-3-0.2, holds up the event loop of node 0, at {PLACE}"


@pytest.mark.parametrize(
    ("status", "is_named", "is_excused"),
    [
        (ENDED_FOR_CULPRIT, True, True),
        (ENDED_FOR_CULPRIT, False, False),
        (ENDED_BY_WATCH, True, False),
        (1, True, False),
    ],
)
def test_only_a_death_for_a_slot_that_is_named_has_an_excuse(
    settings: Settings, file: LoopBlockFile, status: int, is_named: bool, is_excused: bool
) -> None:
    if is_named:
        file.write(held_up_by(2))

    excuse = excuse_for(settings.run_directory, "0")(Death("node-0", status, "last words"))

    assert (excuse is not None) is is_excused
    if excuse:
        assert "slot 0-3-0.2" in excuse
