"""The controller admits by credit and nothing else, and a restarted one goes on where the broker says."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role, declare
from areal_async.config.settings import (
    MIN_IMAGE_STREAM_BYTES,
    BusSettings,
    DatasetSettings,
    EvalSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from areal_async.controller import admission
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.processes.failure_detector import FailureDetector
from areal_async.controller.sampler import Sampler
from areal_async.controller.tasks import Tasks
from areal_async.errors import ConflictError, PipelineError, UserError
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.run_state import DISOWNED, RunState, ServerState
from areal_async.protocol.subjects import ADMITTED, RUN_STATE
from areal_async.protocol.types import (
    Admitted,
    Cut,
    CutGroup,
    CutKind,
    Outcome,
    OutcomeKind,
    Ticket,
    Version,
    WeightsVersion,
)
from areal_async.protocol.wire import decode
from areal_async.versions import evaluations
from areal_async.versions.accuracy import interval_95
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until

pytestmark = pytest.mark.anyio

ROWS = [{"question": str(index)} for index in range(5)]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=2, max_failed_groups=3),
        tasks=(TaskSettings(workflow="w.py", dataset=DatasetSettings(path="x")),),
        rollout=RolloutSettings(
            group_size=2,
            min_group_size=1,
            batch_groups=2,
            max_staleness=1,
            max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES,
        ),
        eval=EvalSettings(every_steps=0),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


class World:
    """Everybody else: what the controller sees of nodes and trainer."""

    def __init__(self, node: Bus, trainer: Bus) -> None:
        self.node, self.trainer = node, trainer

    async def hold(self, version: str, *, final: bool = False) -> None:
        names = self.node.names
        await self.trainer.put(names.weights_key(), WeightsVersion(version=version, path="x", final=final))
        state = ServerState(server_id="s", node_id="n", url="", version=version)
        await self.node.put(names.server_key("s"), state)

    async def cut(self, kind: CutKind, step: int, ids: list[str] | None = None, *, lineage: int = 1) -> None:
        groups = [CutGroup(group_id=group_id, workflow="w", slots=[]) for group_id in ids or []]
        await self.trainer.publish(self.trainer.names.cuts, Cut(kind=kind, lineage=lineage, step=step, groups=groups))

    async def outcome(self, group_id: str, kind: OutcomeKind, *, failed: int = 0) -> None:
        outcome = Outcome(group_id=group_id, kind=kind, lineage=1, num_failed_attempts=failed, reason="it broke")
        await self.trainer.publish(self.trainer.names.outcomes, outcome)

    async def tickets(self, count: int, controller: Controller, *, waits_for: str = "a credit") -> list[Ticket]:
        """All tickets, once there are ``count`` and the controller waits before admitting more."""

        async def is_so() -> bool:
            return len(await self.all_tickets()) >= count and controller.waits_for.startswith(waits_for)

        await until(is_so)
        return await self.all_tickets()

    async def all_tickets(self) -> list[Ticket]:
        names = self.trainer.names
        return [
            decode(one.data, Ticket) for one in await self.trainer.read_log(names.tickets_stream, names.all_tickets)
        ]


@pytest.fixture
async def world(open_role: OpenRole) -> World:
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.cut(CutKind.BEGIN, 0)
    return world


@asynccontextmanager
async def running(controller: Controller) -> AsyncIterator[Controller]:
    """Run a controller for as long as the block lasts."""
    async with anyio.create_task_group() as loops:
        loops.start_soon(controller.run)
        yield controller
        loops.cancel_scope.cancel()


@asynccontextmanager
async def controlling(open_role: OpenRole, settings: Settings, *, held_out: Any = None) -> AsyncIterator[Controller]:
    async with running(_controller(await open_role(Role.CONTROLLER), settings, held_out)) as controller:
        yield controller


def _controller(bus: Bus, settings: Settings, held_out: Any = None, **keywords: Any) -> Controller:
    own = held_out if isinstance(held_out, Tasks) else Tasks([("w", held_out or [])])
    file, num_samples = settings.run.directory / "eval.jsonl", settings.eval.samples
    asked = {"w": "what is asked"}
    evaluator = Evaluator(bus, own, file=file, num_samples=num_samples, asked=asked) if len(own) else None
    accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
    return Controller(bus, settings, Tasks([("w", ROWS)]), evaluator, accounts=accounts, **keywords)


async def test_nothing_is_admitted_before_a_server_holds_announced_weights(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    async with controlling(open_role, settings) as controller:
        assert await world.tickets(0, controller, waits_for="a server") == []

        await world.hold("1-0")

        assert len(await world.tickets(4, controller)) == 4


async def test_a_server_of_a_silent_node_is_disowned_and_that_of_a_speaking_one_waited_for(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    names, lost_s = settings.names, 0.6
    detector = FailureDetector(lost_s=lost_s, deaf_s=lost_s / 4)  # no one pause of this process makes anybody silent
    controller = _controller(await open_role(Role.CONTROLLER), settings, detector=detector, report_s=0.05)
    slow = ServerState(server_id="x-0", node_id="x", url="", version="1-0")
    gone = ServerState(server_id="g-0", node_id="g", url="", version="1-0")
    joiner = ServerState(
        server_id="w-0", node_id="w", url="", version="", fenced=True, reason="starting", wants_weights=True
    )
    for state in (slow, gone, joiner):
        await world.node.put(names.server_key(state.server_id), state)

    async def speak() -> None:
        while True:
            for node_id in ("n", "x"):
                said = msgspec.json.encode({"node_id": node_id, "state": "works"})
                await world.node.emit(names.metrics("node", node_id), said)
            await anyio.sleep(0.05)

    async with running(controller), anyio.create_task_group() as nodes:
        nodes.start_soon(speak)
        await world.hold("1-1")

        for state in (gone, joiner):

            async def is_disowned(key: str = names.server_key(state.server_id)) -> bool:
                said, _ = await world.node.get(key, ServerState)
                return said is not None and said.reason == DISOWNED

            await until(is_disowned)
            disowned, _ = await world.node.get(names.server_key(state.server_id), ServerState)
            assert disowned == msgspec.structs.replace(
                state, version="", fenced=True, reason=DISOWNED, wants_weights=False
            )
        await until(lambda: detector.silent_s("g") > 3 * lost_s)
        assert (await world.node.get(names.server_key("x-0"), ServerState))[0] == slow
        assert controller.report()["held"] == "1-0"
        await world.node.put(names.server_key("x-0"), msgspec.structs.replace(slow, version="1-1"))
        await until(lambda: controller.report()["held"] == "1-1")
        nodes.cancel_scope.cancel()


async def test_credit_returns_when_the_servers_hold_what_a_cut_made(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        first = await world.tickets(4, controller)
        await world.cut(CutKind.CUT, 1, [one.group_id for one in first[:2]])
        assert len(await world.tickets(4, controller)) == 4

        await world.hold("1-1")

        tickets = await world.tickets(6, controller)
        assert len(tickets) == 6
        assert {one.version for one in tickets[4:]} == {"1-1"}
        assert [one.number for one in tickets] == [1, 2, 3, 4, 5, 6]


async def test_tasks_take_turns_by_their_ratios_and_each_has_groups_of_its_own_size(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    other = TaskSettings(workflow="other.py", dataset=DatasetSettings(path="x"), ratio=3.0, group_size=5)
    mixed = settings.model_copy(update={"tasks": (*settings.tasks, other)})
    await world.hold("1-0")
    accounts = Accounts(max_groups_in_flight=mixed.rollout.max_groups_in_flight)
    bus, tasks = await open_role(Role.CONTROLLER), Tasks([("w", ROWS), ("other", ROWS)])
    async with running(Controller(bus, mixed, tasks, None, accounts=accounts)) as controller:
        for one in await world.tickets(4, controller):
            await world.outcome(one.group_id, OutcomeKind.STALE)
        tickets = await world.tickets(8, controller)

    assert sorted((one.workflow, one.group_size) for one in tickets) == [("other", 5)] * 6 + [("w", 2)] * 2
    epochs = Counter((one.workflow, one.group_id.split("-")[0]) for one in tickets)
    assert epochs == {("other", "0"): 5, ("other", "1"): 1, ("w", "0"): 2}


async def test_epochs_follow_each_other_without_a_barrier(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        first = await world.tickets(4, controller)
        for one in first:
            await world.outcome(one.group_id, OutcomeKind.STALE)

        ids = [one.group_id for one in await world.tickets(8, controller)]

        assert len(set(ids)) == 8
        assert [group_id.split("-")[0] for group_id in ids] == ["0"] * 5 + ["1"] * 3


async def test_a_restarted_controller_repeats_and_skips_nothing(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        before = await world.tickets(4, controller)
    await world.outcome(before[0].group_id, OutcomeKind.FAILED, failed=1)

    async with controlling(open_role, settings) as controller:
        after = await world.tickets(5, controller)

    assert len(after) == 5
    assert after[:4] == before
    assert after[4].group_id == before[0].group_id.removesuffix("0") + "1"
    assert after[4].num_failed_attempts == 1
    async with controlling(open_role, settings) as controller:
        assert len(await world.tickets(5, controller)) == 5


async def test_ends_of_attempts_that_nobody_was_given_return_no_credit_and_readmit_nothing(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        first = await world.tickets(4, controller)
        prompt = first[0].group_id.removesuffix("-0")
        for attempt in (1, 5, 6, 7):
            await world.outcome(f"{prompt}-{attempt}", OutcomeKind.FAILED, failed=1)
        await world.outcome(first[1].group_id, OutcomeKind.STALE)

        after = await world.tickets(5, controller)

        assert [one.group_id.split("-")[2] for one in after] == ["0"] * 5
        assert controller.report()["in_flight"] == 4


@pytest.mark.parametrize("admission", ["eager", "fresh"])
async def test_what_is_held_back_is_told_where_groups_are_admitted_late_alone(
    admission: str, open_role: OpenRole, settings: Settings, world: World
) -> None:
    rollout = settings.rollout.model_copy(update={"admission": admission})
    await world.hold("1-0")
    async with controlling(open_role, settings.model_copy(update={"rollout": rollout})) as controller:
        await world.tickets(4, controller)

        assert controller.report().get("num_held_back") == {"eager": None, "fresh": 0}[admission]


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_group_that_ended_before_it_was_admitted_keeps_no_credit_and_its_prompt_is_tried_under_another_name(
    open_role: OpenRole, settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    monkeypatch.setattr(admission, "ADMISSION_BATCH", 1)
    early = str(Sampler(5, seed=settings.run.seed).group_at(5))
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        first = await world.tickets(4, controller)
        if is_cut:
            await world.cut(CutKind.CUT, 1, [early])
        await world.outcome(early, OutcomeKind.TRAINED if is_cut else OutcomeKind.FAILED)
        await world.outcome(first[0].group_id, OutcomeKind.STALE)
        await world.tickets(5, controller)
        await world.outcome(first[1].group_id, OutcomeKind.STALE)

        tickets = await world.tickets(6, controller)

        assert tickets[5].group_id == early.removesuffix("0") + "1"
        assert controller.report()["in_flight"] == 4
    await world.hold("1-1")
    async with controlling(open_role, settings) as controller:
        assert await world.tickets(6, controller) == tickets
        await world.outcome(tickets[5].group_id, OutcomeKind.FAILED, failed=1)
        assert (await world.tickets(7, controller))[6].group_id == early.removesuffix("0") + "2"


async def test_failures_one_after_another_end_the_run_with_their_cause(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    controller = _controller(await open_role(Role.CONTROLLER), settings)
    await world.hold("1-0")

    with (
        anyio.fail_after(PATIENCE_S),
        pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match="3 groups .* it broke"), flatten_subgroups=True),
    ):
        async with anyio.create_task_group() as running:
            running.start_soon(controller.run)
            for one in (await world.tickets(4, controller))[:3]:
                await world.outcome(one.group_id, OutcomeKind.FAILED, failed=1)


@pytest.mark.both_loops
async def test_the_run_ends_when_the_final_version_is_held_and_the_rest_is_abandoned(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    bus = await open_role(Role.CONTROLLER)
    await world.hold("1-0")
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as running:
            controller = _controller(bus, settings)
            running.start_soon(controller.run)
            ids = [one.group_id for one in await world.tickets(4, controller)]
            await world.cut(CutKind.CUT, 1, ids[:1])
            await world.cut(CutKind.CUT, 2, ids[1:3])
            await world.hold("1-2", final=True)

    state, _ = await bus.get(RUN_STATE, RunState)
    assert state is not None
    assert state.state == "finished"
    outcomes = [decode(one.data, Outcome) for one in await bus.read_log(bus.names.outcomes_stream, bus.names.outcomes)]
    assert ids[3] in {one.group_id for one in outcomes}
    assert {one.kind for one in outcomes} == {OutcomeKind.ABANDONED}
    assert not {one.group_id for one in outcomes} & set(ids[:3])


async def test_what_another_controller_admitted_is_abandoned_too_and_that_one_must_stop(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    bus, other = await open_role(Role.CONTROLLER), await open_role(Role.CONTROLLER, "1")
    await world.hold("1-0")
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as running:
            controller = _controller(bus, settings)
            running.start_soon(controller.run)
            ids = [one.group_id for one in await world.tickets(4, controller)]
            _, revision = await other.get(ADMITTED, Admitted)
            revision = await other.compare_and_set(ADMITTED, Admitted(total=5, num_fresh=5), revision)
            await world.cut(CutKind.CUT, 1, ids[:2])
            await world.cut(CutKind.CUT, 2, ids[2:])
            await world.hold("1-2", final=True)

    outcomes = [decode(one.data, Outcome) for one in await bus.read_log(bus.names.outcomes_stream, bus.names.outcomes)]
    assert [(one.group_id, one.kind) for one in outcomes] == [
        (str(Sampler(5, seed=settings.run.seed).group_at(4)), OutcomeKind.ABANDONED)
    ]
    with pytest.raises(ConflictError):
        await other.compare_and_set(ADMITTED, Admitted(total=6, num_fresh=6), revision)


async def test_the_first_evaluation_comes_before_the_group_that_a_second_step_lacks(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    await world.hold("1-0")
    async with controlling(open_role, settings, held_out=ROWS[:3]) as controller:
        early = await world.tickets(1, controller, waits_for="the first evaluation")
        assert len(early) == 2 * settings.rollout.batch_groups - 1
        names, node = world.node.names, world.node
        async with node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox:
            answered = 0
            with anyio.fail_after(PATIENCE_S):
                while answered < 3:
                    for delivery in await inbox.fetch(8, wait_s=2.0):
                        asked = decode(delivery.data, EvalTicket)
                        result = EvalResult(
                            eval_id=asked.eval_id, index=asked.index, reward=asked.index % 2, oldest="1-0", newest="1-0"
                        )
                        await node.publish(names.eval_results("w"), result, msg_id=f"result.{asked.index}")
                        await delivery.ack()
                        answered += 1

        assert len(await world.tickets(4, controller)) == 4
    assert '"accuracy": 0.333' in (settings.run.directory / "eval.jsonl").read_text()


async def test_each_row_is_asked_for_as_many_answers_as_are_wanted_and_they_make_one_record(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    names, node = world.node.names, world.node
    settings = settings.model_copy(update={"eval": EvalSettings(samples=2)})
    file = settings.run.directory / "eval.jsonl"
    await world.hold("1-0")
    asked: set[tuple[int, int]] = set()
    async with (
        node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox,
        controlling(open_role, settings, held_out=ROWS[:2]),
    ):
        with anyio.fail_after(PATIENCE_S):
            while len(asked) < 4:
                for delivery in await inbox.fetch(8, wait_s=2.0):
                    one = decode(delivery.data, EvalTicket)
                    asked.add((one.index, one.sample))
                    result = EvalResult(
                        eval_id=one.eval_id,
                        index=one.index,
                        sample=one.sample,
                        reward=float(one.sample == one.index == 0),
                        error="too late" if one.sample == one.index == 1 else "",
                        num_tokens=7,
                    )
                    await node.publish(names.eval_results("w"), result)
                    await delivery.ack()
        await until(lambda: file.exists() and bool(file.read_text()))

    (line,) = map(msgspec.json.decode, file.read_text().splitlines())
    kept = evaluations.read(file.parent, Version(1, 0))
    assert [(one.task, one.row, one.sample, one.reward, one.error, one.num_tokens) for one in kept] == [
        ("w", 0, 0, 1.0, "", 7),
        ("w", 0, 1, 0.0, "", 7),
        ("w", 1, 0, 0.0, "", 7),
        ("w", 1, 1, None, "too late", 7),
    ]
    assert evaluations.evaluated(file.parent) == [Version(1, 0)]
    assert asked == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (line["accuracy"], line["num_scored"], line["num_failed"]) == (0.25, 3, 1)
    assert (line["num_samples"], line["pass_at"], line["asked"]) == (2, {"1": 0.25, "2": 1.0}, "what is asked")
    assert line["reasons"] == {"too late": 1}


async def test_a_result_that_comes_again_is_no_progress_of_its_evaluation(
    open_role: OpenRole, settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation whose last row hangs would never count as stalled: a result comes again while it is held."""
    monkeypatch.setattr("areal_async.config.settings.TICKET_ACK_WAIT_S", 1.0)
    controller, operator = await open_role(Role.CONTROLLER), await open_role(Role.OPERATOR)
    await declare(operator, settings)
    names, node = world.node.names, world.node
    evaluator = Evaluator(controller, Tasks([("w", ROWS[:2])]), file=settings.run.directory / "eval.jsonl")
    num_results = 0

    def on_result() -> None:
        nonlocal num_results
        num_results += 1

    async def has_come_thrice() -> bool:
        path = f"$JS.API.CONSUMER.INFO.{names.eval_stream}.{names.eval_controller_consumer}"
        return int((await operator.api.ask(path))["delivered"]["consumer_seq"]) >= 3

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(evaluator.evaluate, Version.parse("1-0"), due_step=0, on_result=on_result))
        for index in range(2):
            result = EvalResult(eval_id="1-0", index=index, reward=1.0, oldest="1-0", newest="1-0")
            await node.publish(names.eval_results("w"), result)
            if index == 0:
                await until(has_come_thrice)

    assert num_results == 2


async def test_every_task_is_evaluated_on_its_own_rows_while_prompts_are_admitted(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    """At the second evaluation, which nobody answers yet, admission goes on."""
    names, node = world.node.names, world.node
    held_out = Tasks([("w", ROWS[:2]), ("other", ROWS[2:5])])
    both = settings.model_copy(update={"eval": EvalSettings(every_steps=1)})

    async def answer(inbox: Any, eval_id: str, *, newest: str) -> list[tuple[str, int]]:
        asked: list[tuple[str, int]] = []
        with anyio.fail_after(PATIENCE_S):
            while len(asked) < 5:
                for delivery in await inbox.fetch(8, wait_s=2.0):
                    one = decode(delivery.data, EvalTicket)
                    assert one.eval_id == eval_id
                    asked.append((one.workflow, int(one.row["question"])))
                    result = EvalResult(
                        eval_id=eval_id,
                        index=one.index,
                        reward=1.0 if one.workflow == "w" else -1.0,
                        oldest=eval_id,
                        newest=newest,
                    )
                    await node.publish(names.eval_results(one.workflow), result)
                    await delivery.ack()
        return sorted(asked)

    await world.hold("1-0")
    async with (
        node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox,
        controlling(open_role, both, held_out=held_out) as controller,
    ):
        asked = await answer(inbox, "1-0", newest="1-0")
        first = await world.tickets(4, controller)
        await world.cut(CutKind.CUT, 1, [one.group_id for one in first[:2]])
        await world.hold("1-1")
        assert len(await world.tickets(6, controller)) == 6
        assert await answer(inbox, "1-1", newest="1-2") == asked
        file = settings.run.directory / "eval.jsonl"
        await until(lambda: len(file.read_text().splitlines()) == 4)

    assert asked == [("other", 2), ("other", 3), ("other", 4), ("w", 0), ("w", 1)]
    lines = [msgspec.json.decode(line) for line in file.read_text().splitlines()]
    assert [(one["workflow"], one["step"], one["accuracy"], one["num_scored"]) for one in lines] == [
        ("w", 0, 1.0, 2), ("other", 0, -1.0, 3), ("w", 1, 1.0, 2), ("other", 1, -1.0, 3),
    ]  # fmt: skip
    assert [one["is_graded"] for one in lines] == [False, True, False, True]
    assert [(one["oldest"], one["newest"]) for one in lines] == [("1-0", "1-0")] * 2 + [("1-1", "1-2")] * 2


async def test_an_operator_has_the_version_evaluated_that_servers_hold_once(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    """Whoever asks again, asks another controller, or asks for an older version gets the records that there are."""
    names, node = world.node.names, world.node
    await world.hold("1-0")

    async def answer(inbox: Any, *, count: int) -> set[str]:
        asked = set()
        with anyio.fail_after(PATIENCE_S):
            for _ in range(count):
                (delivery,) = await fetch_all(inbox, 1)
                one = decode(delivery.data, EvalTicket)
                asked.add(one.eval_id)
                result = EvalResult(eval_id=one.eval_id, index=one.index, reward=one.index % 2, oldest="", newest="")
                await node.publish(names.eval_results("w"), result)
                await delivery.ack()
        return asked

    async def is_made(controller: Controller, wanted: str) -> bool:
        return bool((await controller.evaluation.ask({"version": wanted}))["records"])

    async with node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox:
        async with controlling(open_role, settings, held_out=ROWS[:2]) as controller:
            await answer(inbox, count=2)
            first = await world.tickets(4, controller)
            await world.cut(CutKind.CUT, 1, [one.group_id for one in first[:2]])
            await world.hold("1-1")
            await until(lambda: controller.report()["held"] == "1-1")

            begun = await controller.evaluation.ask({})
            assert begun == {"version": "1-1", "records": []}
            assert await answer(inbox, count=2) == {"1-1"}
            await until(lambda: is_made(controller, "1-1"))

        async with controlling(open_role, settings, held_out=ROWS[:2]) as controller:
            await until(lambda: controller.report()["held"] == "1-1")
            (record,) = (await controller.evaluation.ask({}))["records"]
            (older,) = (await controller.evaluation.ask({"version": "1-0"}))["records"]
            with pytest.raises(UserError, match="version: got newest, need one like 1-42"):
                await controller.evaluation.ask({"version": "newest"})

    assert (record["eval_id"], record["step"], record["accuracy"], older["eval_id"]) == ("1-1", 1, 0.5, "1-0")
    assert (record["low"], record["high"]) == pytest.approx(interval_95([0.0, 1.0]))
    lines = (settings.run.directory / "eval.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line)["eval_id"] for line in lines] == ["1-0", "1-1"]


async def test_what_the_run_went_back_behind_is_evaluated_anew_and_stays_on_record(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    names, node = world.node.names, world.node
    settings = settings.model_copy(update={"eval": EvalSettings(every_steps=1)})
    file = settings.run.directory / "eval.jsonl"

    def evaluated() -> list[str]:
        return [msgspec.json.decode(line)["eval_id"] for line in file.read_text().splitlines()]

    async with (
        node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox,
        controlling(open_role, settings, held_out=ROWS[:1]),
    ):
        for version, expected in (("1-0", ["1-0"]), ("1-1", ["1-0", "1-1"]), ("2-1", ["1-0", "1-1", "2-1"])):
            if version == "2-1":
                await world.cut(CutKind.BEGIN, 0, lineage=2)
                branch = Cut(kind=CutKind.BRANCH, lineage=2, step=0, branches={"2": 0})
                await world.trainer.publish(names.cuts, branch)
                await world.hold("2-0")  # which 1-0 stands for
            await world.hold(version)
            (delivery,) = await fetch_all(inbox, 1)
            one = decode(delivery.data, EvalTicket)
            await node.publish(names.eval_results("w"), EvalResult(eval_id=one.eval_id, index=one.index, reward=1.0))
            await delivery.ack()
            await until(lambda expected=expected: file.exists() and evaluated() == expected)


async def test_a_run_that_stands_still_says_who_waits_for_whom(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    operator = await open_role(Role.OPERATOR)
    impatient = settings.model_copy(update={"run": settings.run.model_copy(update={"watchdog_s": 0.5})})
    said = {"state": "waiting", "waits_for": "due groups of step 3: 0-17-0", "step": 2}
    expected = {"trainer": said["waits_for"], "controller": "a server that holds an announced version"}
    async with operator.subscribe(operator.names.all_events) as events, controlling(open_role, impatient):
        with anyio.fail_after(PATIENCE_S):
            while True:
                await world.trainer.emit(world.trainer.names.metrics("trainer"), msgspec.json.encode(said))
                with anyio.move_on_after(0.5):
                    event = msgspec.json.decode((await anext(events))[1])
                    # The first ones may come before the trainer was heard, or while the controller still reads the log.
                    if event.get("event") == "run.stalled" and expected.items() <= event["waits_for"].items():
                        break
