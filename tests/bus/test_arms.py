"""Arms are asked their exact share and every pair counts once, whenever the controller dies."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.config.settings import TICKET_ACK_WAIT_S, Settings
from areal_async.controller import arms
from areal_async.controller.controller import Controller
from areal_async.errors import PipelineError
from areal_async.process.failpoints import FIRED, SPECIFICATION, FaultPoints
from areal_async.protocol.arms import MAX_OPEN, Arm, ArmResult, Arms, ArmState, ArmTicket
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.subjects import ARMS
from areal_async.protocol.types import OutcomeKind
from areal_async.versions.comparison import read_result
from tests.brokers import OpenRole, kill, until
from tests.bus.admissions import begin, controller_of, settings_of
from tests.bus.test_controller import World, running

pytestmark = pytest.mark.anyio

NUM_ROWS = 40
ARM = Arm(name="old", arm_id="old-1", version="1-0", path="x", share=0.3, first_admission=0, first_position=0)
Rewards = Callable[[ArmTicket], tuple[float, float] | None]
"""What arm and newest weights get for a prompt; None where the result is lost."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(arms, "ROUND_S", 0.1)
    return settings_of(tmp_path, "w", in_flight=8)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead controller held comes again soon."""
    monkeypatch.setattr("areal_async.config.settings.TICKET_ACK_WAIT_S", 2.0)


class Answers:
    """A node that answers arms, and what it was asked."""

    def __init__(self, bus: Bus, rewards: Rewards) -> None:
        self._bus = bus
        self._rewards = rewards
        self.asked: Counter[int] = Counter()
        self.rows: dict[int, str] = {}
        self.may_speak = anyio.Event()
        self.may_speak.set()

    async def run(self) -> None:
        names = self._bus.names
        async with self._bus.consume(names.eval_stream, names.arm_nodes_consumer) as inbox:
            while True:
                await self.may_speak.wait()
                for delivery in await inbox.fetch(5, wait_s=0.2):
                    ticket = await self._bus.decode(delivery, ArmTicket)
                    assert ticket is not None
                    self.asked[ticket.number] += 1
                    self.rows[ticket.number] = str(ticket.index)
                    if (rewards := self._rewards(ticket)) is not None:
                        sides = [
                            EvalResult(
                                eval_id=ticket.eval_id, index=ticket.index, reward=one, oldest="1-0", newest="1-3"
                            )
                            for one in rewards
                        ]
                        result = ArmResult(arm_id=ticket.arm_id, number=ticket.number, pinned=sides[0], newest=sides[1])
                        await self._bus.publish(
                            names.arm_results(ticket.arm_id), result, msg_id=f"arm.{ticket.answer}.{ticket.attempt}"
                        )
                    await delivery.ack()


class Scene:
    """A controller that may die, a trainer that ends every group at once, a node that answers."""

    def __init__(self, open_role: OpenRole, settings: Settings, world: World, operator: Bus, answers: Answers) -> None:
        self.open_role, self.settings, self.world, self.operator, self.answers = (
            open_role, settings, world, operator, answers,
        )  # fmt: skip
        self._num_controllers = 0

    async def set_arms(self, *wanted: Arm) -> None:
        await self.operator.put(ARMS, Arms(by_name={arm.name: arm for arm in wanted}))

    async def controller(self) -> Controller:
        self._num_controllers += 1
        bus = await self.open_role(Role.CONTROLLER, str(self._num_controllers))
        return controller_of(bus, self.settings, num_rows=NUM_ROWS)

    async def state(self, arm: Arm = ARM) -> ArmState:
        found, _ = await self.operator.get(self.operator.names.arm_key(arm.name), ArmState)
        return found or ArmState(arm_id="none")

    async def end_groups(self, num_groups: int) -> None:
        """Have so many groups end in all, none of them trained."""
        ended: set[str] = set()
        while len(ended) < num_groups:
            for ticket in await self.world.all_tickets():
                if ticket.group_id not in ended and len(ended) < num_groups:
                    ended.add(ticket.group_id)
                    await self.world.outcome(ticket.group_id, OutcomeKind.FILTERED)
            await anyio.sleep(0.01)


def even(ticket: ArmTicket) -> tuple[float, float]:
    return float(ticket.number % 2), float(ticket.number % 3 == 0)


@asynccontextmanager
async def answering(open_role: OpenRole, settings: Settings, rewards: Rewards = even) -> AsyncIterator[Scene]:
    world = await begin(open_role)
    answers = Answers(await open_role(Role.NODE, "answers"), rewards)
    scene = Scene(open_role, settings, world, await open_role(Role.OPERATOR), answers)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answers.run)
        yield scene
        tasks.cancel_scope.cancel()


def test_its_share_is_exact_and_its_rows_are_those_of_the_admissions_with_which_they_fall_due() -> None:
    for share in (0.1, 0.29, 1.0, 0.000001, 1 / 3):
        arm = msgspec.structs.replace(ARM, share=share, first_admission=7, first_position=5)
        due = [arm.num_due(7 + num) for num in range(2000)]
        falls_due = [num - 1 for num in range(1, 2000) if due[num] > due[num - 1]]

        assert arm.num_due(0) == 0
        assert abs(due[-1] - share * 1999) < 1
        assert [arm.position(number) - 5 for number in range(1, due[-1] + 1)] == falls_due
    assert msgspec.structs.replace(ARM, share=0.29).num_due(100) == 29, "0.29 * 100 is less in floats"


async def test_an_arm_has_its_share_of_what_is_admitted_and_the_rows_of_those_admissions(
    open_role: OpenRole, settings: Settings
) -> None:
    async with answering(open_role, settings) as scene, running(await scene.controller()) as controller:
        await scene.set_arms(ARM)
        await scene.end_groups(42)

        async def is_done() -> bool:
            return (await scene.state()).num_counted == ARM.num_due(50)

        await until(is_done)
        names = scene.operator.names

        async def is_settled() -> bool:
            return not await scene.operator.stored_by_subject(names.eval_stream, names.arm_messages("*"))

        await until(is_settled, within_s=TICKET_ACK_WAIT_S / 2)
        tickets = await scene.world.all_tickets()
        state = await scene.state()

    assert len(tickets) == 50
    assert scene.answers.asked == Counter(dict.fromkeys(range(1, 16), 1))
    by_number = {ticket.number: ticket.group_id.split("-")[1] for ticket in tickets}
    assert [scene.answers.rows[number] for number in range(1, 16)] == [
        by_number[-(-number * 10 // 3)] for number in range(1, 16)
    ]
    assert (state.num_pairs, state.num_wins, state.num_losses) == (15, 5, 2)
    assert (state.pinned_total, state.newest_total) == (8.0, 5.0)
    assert (state.oldest, state.newest) == ("1-0", "1-3")
    assert state.low < 0 < state.high < 1
    assert controller.report()["arms"]["old"]["num_pairs"] == 15


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("point", ["before_arm_state", "after_arm_state", "before_tickets", "after_cursor"])
async def test_no_prompt_is_asked_twice_and_no_pair_counted_twice_when_the_controller_dies(
    open_role: OpenRole, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with answering(open_role, settings) as scene:
        await scene.set_arms(ARM)
        for occurrence in (2, 3):
            armed = {SPECIFICATION: f"controller.{point}:{occurrence}:raise", FIRED: str(tmp_path / f"{occurrence}")}
            reach = FaultPoints(armed).reach
            monkeypatch.setattr(arms, "failpoint", reach)
            monkeypatch.setattr("areal_async.controller.controller.failpoint", reach)
            with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match=point), flatten_subgroups=True):
                async with running(await scene.controller()):
                    await scene.end_groups(40 * occurrence)
                    await anyio.sleep_forever()
        async with running(await scene.controller()):
            await scene.end_groups(132)

            async def is_done() -> bool:
                return (await scene.state()).num_counted == ARM.num_due(140)

            await until(is_done)
        state = await scene.state()

    assert len(await scene.world.all_tickets()) == 140
    assert set(scene.answers.asked) == set(range(1, 43))
    assert max(scene.answers.asked.values()) == 1
    assert (state.num_asked, state.num_pairs) == (42, 42)
    assert state.pinned_total == 21.0
    assert state.newest_total == 14.0


async def test_it_waits_for_answers_with_few_open_and_catches_up(open_role: OpenRole, settings: Settings) -> None:
    arm = msgspec.structs.replace(ARM, share=1.0)
    async with answering(open_role, settings) as scene, running(await scene.controller()) as controller:
        scene.answers.may_speak = anyio.Event()
        await scene.set_arms(arm)
        await scene.end_groups(100)

        async def is_full() -> bool:
            return (await scene.state()).num_asked == MAX_OPEN

        await until(is_full)
        await anyio.sleep(0.5)
        assert controller.report()["arms"]["old"]["num_open"] == MAX_OPEN
        scene.answers.may_speak.set()

        async def is_done() -> bool:
            return (await scene.state()).num_pairs == 108

        await until(is_done)


async def test_what_is_lost_is_asked_again_and_given_up_in_the_end(open_role: OpenRole, settings: Settings) -> None:
    def lossy(ticket: ArmTicket) -> tuple[float, float] | None:
        is_lost = ticket.number == 3 or (ticket.number == 5 and not ticket.attempt)
        return None if is_lost else (1.0, 0.0)

    async with answering(open_role, settings, lossy) as scene, running(await scene.controller()):
        await scene.set_arms(ARM)
        await scene.end_groups(42)

        async def is_done() -> bool:
            return (await scene.state()).num_counted == 15

        await until(is_done)
        state = await scene.state()

    assert (state.num_pairs, state.num_failed, state.last_failure) == (14, 1, arms.LOST)
    assert (scene.answers.asked[3], scene.answers.asked[5], scene.answers.asked[6]) == (3, 2, 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("point", ["after_arm_state", "after_arm_told"])
async def test_an_arm_that_is_told_apart_is_told_of_once(
    open_role: OpenRole, settings: Settings, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:  # fmt: skip
    arm = msgspec.structs.replace(ARM, share=1.0)
    async with answering(open_role, settings, lambda ticket: (1.0, 0.0)) as scene:
        await scene.set_arms(arm)
        fired = tmp_path / "fired"
        armed = {SPECIFICATION: f"controller.{point}:1:raise", FIRED: str(fired)}
        if point == "after_arm_state":

            def die_once_decided(name: str) -> None:
                if name.endswith(point) and scene_asked.get("decided"):
                    FaultPoints(armed).reach(name)

            scene_asked: dict[str, bool] = {}
            true_counted = arms.counted

            def noting(*args: object) -> ArmState:
                state = true_counted(*args)  # type: ignore[arg-type]
                scene_asked["decided"] = bool(state.decided_at)
                return state

            monkeypatch.setattr(arms, "counted", noting)
            monkeypatch.setattr(arms, "failpoint", die_once_decided)
        else:
            monkeypatch.setattr(arms, "failpoint", FaultPoints(armed).reach)
        with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match=point), flatten_subgroups=True):
            async with running(await scene.controller()):
                await scene.end_groups(60)
                await anyio.sleep_forever()
        kill(broker)
        async with running(await scene.controller()):

            async def is_told() -> bool:
                return (await scene.state()).is_told

            await until(is_told)
            await scene.end_groups(70)
        state = await scene.state()
        names = scene.operator.names
        told = await scene.operator.read_log(names.events_stream, names.event("arm.decided", "controller"))

    assert state.decided_at
    assert state.low >= 0
    (event,) = [msgspec.json.decode(message.data) for message in told]
    assert event["sentence"].startswith("arm old (1-0) is better than the newest weights by 1.000 (+")
    assert event["num_pairs"] >= state.decided_at
    (folder,) = (settings.run_directory / "comparisons").iterdir()
    assert folder.name == event["comparison"]
    compared = read_result(folder)
    assert compared.b.version == "1-0"
    assert compared.overall is not None
    assert compared.overall.low == event["low"] >= 0


async def test_what_is_stored_for_an_arm_goes_with_it_and_its_name_begins_anew(
    open_role: OpenRole, settings: Settings
) -> None:
    other = msgspec.structs.replace(ARM, arm_id="old-2", first_admission=50, first_position=50)
    async with answering(open_role, settings) as scene, running(await scene.controller()) as controller:
        scene.answers.may_speak = anyio.Event()
        await scene.set_arms(ARM)
        await scene.end_groups(42)

        async def is_asked() -> bool:
            return (await scene.state()).num_asked == 15

        await until(is_asked)
        names = scene.operator.names
        compared = ArmTicket(
            eval_id="1-0", index=0, workflow="w", row={}, arm="side", arm_id="side-1", number=1, num_samples=1
        )
        side = msgspec.structs.replace(ARM, name="side", arm_id="side-1")
        await scene.operator.put(ARMS, Arms(by_name={"old": other}, compared={"side": side}))
        await scene.operator.publish(names.arm_tickets("side-1"), compared, msg_id="side-1")

        async def is_purged() -> bool:
            return not await scene.operator.stored_by_subject(names.eval_stream, names.arm_messages(ARM.arm_id))

        async def is_gone() -> bool:
            return not await scene.operator.stored_by_subject(names.eval_stream, names.arm_messages("side-1"))

        await until(is_purged)
        assert await scene.operator.stored_by_subject(names.eval_stream, names.arm_messages("side-1"))
        await scene.set_arms(other)
        await until(is_gone)
        scene.answers.may_speak.set()
        scene.answers.asked.clear()
        await scene.end_groups(62)

        async def is_done() -> bool:
            return (await scene.state()).num_pairs == 6

        await until(is_done)
        assert (await scene.state()).arm_id == "old-2"
        assert controller.report()["arms"]["old"]["num_asked"] == 6
