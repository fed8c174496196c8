"""Nodes of a live run answer a comparison at a share of training, and whoever makes it may die at any time."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role, ask_service, serving
from areal_async.cli.compare import by_nodes
from areal_async.config.settings import EvalSettings, InferenceSettings, Settings
from areal_async.controller import compare_orders
from areal_async.controller.compare_orders import COMPARE, CompareOrders
from areal_async.data.rows import RowPrompts
from areal_async.errors import UserError
from areal_async.protocol.arms import ArmAnswer, Arms, ArmTicket, Pinned
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import ADMITTED, ARMS, RUN_STATE
from areal_async.protocol.types import Admitted
from areal_async.versions.audit import read as read_audit
from areal_async.versions.comparison import ComparisonFolder, opened
from tests.brokers import PATIENCE_S, OpenRole, until
from tests.unit.versions.test_comparison import comparison

pytestmark = pytest.mark.anyio

SIDE = Pinned(name="compare_1_b", arm_id="compare_1_b-1", version="1-40", path="/models/b")
NUM_ROWS = 12


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(compare_orders, "LOOK_S", 0.05)
    monkeypatch.setattr(by_nodes, "ROUND_S", 0.05)
    return settings.model_copy(update={"eval": EvalSettings(share=0.5)})


@asynccontextmanager
async def ordering(bus: Bus, settings: Settings) -> AsyncIterator[None]:
    orders = CompareOrders(bus, settings)
    async with (
        serving(bus, description="", report=dict, endpoints=orders.endpoints),
        anyio.create_task_group() as leases,
    ):
        leases.start_soon(orders.run_leases)
        yield
        leases.cancel_scope.cancel()


async def served(bus: Bus) -> dict[str, Pinned]:
    found, _ = await bus.get(ARMS, Arms)
    return dict((found or Arms()).compared)


async def order(operator: Bus, **body: Any) -> str:
    try:
        answer = await ask_service(operator, operator.names.control(COMPARE), body, deadline_s=PATIENCE_S)
    except UserError as exc:
        return f"no: {exc}"
    return str(answer["lease_s"])


def told(side: Pinned, **other: Any) -> dict[str, Any]:
    return {"name": side.name, "arm_id": side.arm_id, "path": side.path, "version": side.version, "by": "ann", **other}


async def test_a_side_is_served_for_as_long_as_somebody_asks(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, controller = await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER)
    async with ordering(controller, settings):
        assert await order(operator, **told(SIDE)) == "60.0"
        assert await order(operator, **told(SIDE)) == "60.0"
        assert await served(operator) == {SIDE.name: SIDE}
        assert [act.what for act in read_audit(settings.run_directory)] == ["compare 1-40"], "once"
        assert await order(operator, name=SIDE.name) == "0.0"
        assert await served(operator) == {}
        await order(operator, **told(SIDE))

    monkeypatch.setattr(compare_orders, "LEASE_S", 0.2)  # of the next controller, which nobody asks
    async with ordering(controller, settings):
        assert await served(operator) == {SIDE.name: SIDE}

        async def is_over() -> bool:
            return not await served(operator)

        await until(is_over)


@pytest.mark.parametrize(
    ("change", "body", "why"),
    [
        ({}, {"path": ""}, "path"),
        ({}, {"arm_id": "a.b"}, "arm_id"),
        ({}, {"name": "1 2"}, "name"),
        ({}, {"version": "newest"}, "version"),
        ({"eval": EvalSettings(share=0)}, {}, "the run has eval.share=0, so its nodes answer for no comparison"),
        ({"inference": InferenceSettings(colocate="split")}, {}, "got a run with inference.colocate=split"),
    ],
)
async def test_what_nodes_cannot_serve_is_refused(
    open_role: OpenRole, settings: Settings, change: dict[str, Any], body: dict[str, Any], why: str
) -> None:
    operator, controller = await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER)
    async with ordering(controller, settings.model_copy(update=change)):
        said = await order(operator, **told(SIDE, **body))

        assert said.startswith("no: compare: ")
        assert why in said
        assert await served(operator) == {}


async def test_there_are_no_more_comparisons_than_nodes_can_be_asked_to_serve(
    open_role: OpenRole, settings: Settings
) -> None:
    operator, controller = await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER)
    async with ordering(controller, settings):
        for number in range(4):
            await order(operator, **told(SIDE, name=f"c{number}"))

        refused = await order(operator, **told(SIDE, name="c4"))

    assert refused == "no: compare: the run makes 4 comparisons already; wait for one of them"


class Scene:
    """A run that admits as it is told, and a node that answers."""

    def __init__(self, controller: Bus, node: Bus, operator: Bus, settings: Settings) -> None:
        self.controller, self.node, self.operator, self.settings = controller, node, operator, settings
        self.asked: list[ArmTicket] = []
        self.side: Pinned | None = None

    async def admit(self, total: int) -> None:
        await self.controller.put(
            ADMITTED, Admitted(total=total, num_fresh=total, num_readmitted=0, num_skipped=0, known={}, mixes=[])
        )

    async def run_node(self, loses: Callable[[ArmTicket], bool] = lambda ticket: False) -> None:
        """Answer each ticket: odd rows right."""
        names = self.node.names
        async with self.node.consume(names.eval_stream, names.arm_nodes_consumer) as inbox:
            while True:
                for delivery in await inbox.fetch(5, wait_s=0.2):
                    ticket = await self.node.decode(delivery, ArmTicket)
                    assert ticket is not None
                    self.asked.append(ticket)
                    if not loses(ticket):
                        result = EvalResult(eval_id=ticket.eval_id, index=ticket.index, reward=float(ticket.index % 2))
                        answer = ArmAnswer(arm_id=ticket.arm_id, number=ticket.number, result=result, text="said")
                        await self.node.publish(
                            names.arm_answers(ticket.arm_id), answer, msg_id=f"arm.{ticket.answer}.{ticket.attempt}"
                        )
                    await delivery.ack()

    async def is_served(self) -> None:
        async def is_there() -> bool:
            return await served(self.operator) == {SIDE.name: self.side}

        await until(is_there)

    async def ask(self, folder: ComparisonFolder) -> bool:
        """Ask side b, under an id of its own as each time."""
        self.side = msgspec.structs.replace(SIDE, arm_id=f"{SIDE.name}-{len(self.asked)}")
        rows = {"w": RowPrompts([{"question": str(row)} for row in range(NUM_ROWS)], range(NUM_ROWS))}
        return await by_nodes.NodeQuestions(self.operator, self.settings, folder, "b", self.side, rows).run()


@asynccontextmanager
async def scene_of(open_role: OpenRole, settings: Settings) -> AsyncIterator[Scene]:
    controller = await open_role(Role.CONTROLLER)
    scene = Scene(controller, await open_role(Role.NODE), await open_role(Role.OPERATOR), settings)
    await scene.admit(100)
    async with ordering(controller, settings):
        yield scene


@asynccontextmanager
async def asking(scene: Scene, folder: ComparisonFolder) -> AsyncIterator[list[bool]]:
    """Ask while the block runs; the list has whether all was answered, once that is over."""
    ended: list[bool] = []

    async def ask() -> None:
        ended.append(await scene.ask(folder))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        yield ended
        tasks.cancel_scope.cancel()


async def test_a_side_is_asked_its_share_and_the_rest_after_whoever_asked_has_died(
    open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    answers_of_one = settings.eval.share * settings.rollout.group_size
    async with scene_of(open_role, settings) as scene, anyio.create_task_group() as node:
        node.start_soon(scene.run_node)
        with opened(tmp_path / "c", comparison(w=NUM_ROWS, num_samples=2)) as folder:
            async with asking(scene, folder):
                await scene.is_served()
                await scene.admit(101)
                await until(lambda: len(folder.answers) == answers_of_one)
            assert await served(scene.operator) == {}, "whoever is cancelled ends it"
        with opened(tmp_path / "c", comparison(w=NUM_ROWS, num_samples=2)) as folder:
            async with asking(scene, folder) as ended:
                await scene.is_served()
                await scene.admit(200)
                await until(lambda: bool(ended))
        node.cancel_scope.cancel()

    assert ended == [True]
    asked = [(ticket.index, ticket.sample) for ticket in scene.asked]
    assert asked == [(row, sample) for row in range(NUM_ROWS) for sample in range(2)], "each once"
    assert {(ticket.num_samples, ticket.row["question"] == str(ticket.index)) for ticket in scene.asked} == {(2, True)}
    assert {(one.side, one.row % 2, one.reward, one.text, one.version) for one in folder.answers} == {
        ("b", 0, 0.0, "said", "1-40"), ("b", 1, 1.0, "said", "1-40"),
    }  # fmt: skip
    names = scene.operator.names
    assert await scene.operator.stored_by_subject(names.eval_stream, names.arm_messages("*")) == {}


async def test_what_is_lost_is_asked_again_and_at_last_an_error(
    open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    def is_lost(ticket: ArmTicket) -> bool:
        return ticket.index == 0 or (ticket.index == 1 and ticket.attempt == 0)

    async with scene_of(open_role, settings) as scene, anyio.create_task_group() as node:
        node.start_soon(scene.run_node, is_lost)
        with opened(tmp_path / "c", comparison(w=3)) as folder:
            async with asking(scene, folder) as ended:
                await scene.is_served()
                await scene.admit(200)
                await until(lambda: bool(ended))
        node.cancel_scope.cancel()

    assert [(one.row, one.reward, one.error) for one in folder.answers] == [
        (0, None, by_nodes.LOST), (1, 1.0, ""), (2, 0.0, ""),
    ]  # fmt: skip


async def test_it_ends_unfinished_with_its_run(open_role: OpenRole, settings: Settings, tmp_path: Path) -> None:
    async with scene_of(open_role, settings) as scene:
        with opened(tmp_path / "c", comparison(w=3)) as folder:
            async with asking(scene, folder) as ended:
                await scene.is_served()
                await scene.operator.put(RUN_STATE, RunState(state="finished"))
                await until(lambda: bool(ended))

    assert ended == [False]
    assert folder.answers == []
