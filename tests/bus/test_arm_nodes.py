"""Nodes serve the arms that are wanted, answer their prompts by both sides, and go on where an arm cannot be served."""

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from areal_async.bus import EmbeddedBroker, Role
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    InferenceSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    Settings,
    TaskSettings,
)
from areal_async.inference.commands import most_servers
from areal_async.protocol import wire
from areal_async.protocol.arms import Arm, ArmAnswer, ArmResult, Arms, ArmTicket, Pinned
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.subjects import ARMS
from areal_async.rollout import arms as node_arms
from areal_async.rollout import leases
from areal_async.rollout.arms import NodeArms
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.recovery import recover, row_key
from areal_async.rollout.user_code.loop_block_report import LoopBlock, LoopBlockFile, Work
from tests.brokers import PATIENCE_S, OpenRole, until
from tests.bus.test_node import MODEL, TESTS, Run
from tests.unit.rollout.byte_model import ScriptedModel, codec

pytestmark = pytest.mark.anyio

WORKFLOW = """
async def play(prompt, policy):
    reply = await policy.complete([5, 6, 7])
    if prompt["question"] == "hard":
        raise ValueError("too hard")
    if prompt["question"] == "sampled":
        return policy.sampling.temperature
    if prompt["question"] == "spoiled":
        raise ValueError("the other side has changed the row")
    prompt.row["question"] = "spoiled"
    return float(len(reply.token_ids))
"""
HANGS_ONCE = """
from pathlib import Path
import anyio

async def play(prompt, policy):
    marker = Path("{marker}")
    if not marker.exists():
        marker.touch()
        await anyio.sleep_forever()
    await policy.complete([5, 6, 7])
    return 1.0
"""
ARM = Arm(name="old", arm_id="old-1", version="1-0", path=str(MODEL), share=0.1, first_admission=0, first_position=0)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fakes'}:{TESTS.parent}")
    monkeypatch.setattr(leases, "ELSEWHERE_S", 0.1)
    monkeypatch.setattr(leases, "ARM_GATHER_S", 0.05)
    monkeypatch.setattr(node_arms, "READY_POLL_S", 0.02)
    monkeypatch.setattr(node_arms, "RETRY_S", 0.2)
    workflow = tmp_path / "play.py"
    workflow.write_text(WORKFLOW)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path / "runs"),
        tasks=(TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="none")),),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        rollout=RolloutSettings(
            group_size=2, min_group_size=2, sampling=SamplingSettings(max_new_tokens=16), max_stream_bytes=2 << 20,
            max_trajectory_bytes=1 << 16,
        ),
        inference=InferenceSettings(backend="sglang", python=Path(sys.executable), start_deadline_s=PATIENCE_S),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )  # fmt: skip


class ArmRun(Run):
    async def set_arms(self, *wanted: Arm) -> None:
        await self.controller.put(ARMS, Arms(by_name={arm.name: arm for arm in wanted}))

    async def ask(self, number: int, *, arm: Pinned = ARM, question: str = "easy", num_samples: int = 0) -> ArmTicket:
        ticket = ArmTicket(
            eval_id="1-0", index=3, workflow="play", row={"question": question}, arm=arm.name, arm_id=arm.arm_id,
            number=number, num_samples=num_samples,
        )  # fmt: skip
        await self.controller.publish(self.names.arm_tickets(arm.arm_id), ticket, msg_id=ticket.answer)
        return ticket

    async def answers(self, num_answers: int) -> list[ArmAnswer]:
        """What arms answered alone."""
        found: list[ArmAnswer] = []

        async def are_there() -> bool:
            messages = await self.operator.read_log(self.names.eval_stream, self.names.arm_answers("*"))
            found[:] = [wire.decode(message.data, ArmAnswer) for message in messages]
            return len(found) >= num_answers

        await until(are_there)
        return sorted(found, key=lambda answer: answer.number)

    async def results(self, num_results: int) -> list[ArmResult]:
        found: list[ArmResult] = []

        async def are_there() -> bool:
            messages = await self.operator.read_log(self.names.eval_stream, self.names.arm_results("*"))
            found[:] = [wire.decode(message.data, ArmResult) for message in messages]
            return len(found) >= num_results

        await until(are_there)
        return sorted(found, key=lambda result: result.number)

    async def num_tickets(self, arm: Pinned = ARM) -> int:
        subject = self.names.arm_tickets(arm.arm_id)
        return (await self.operator.stored_by_subject(self.names.eval_stream, subject)).get(subject, 0)

    @asynccontextmanager
    async def reports(self) -> AsyncIterator[list[dict[str, object]]]:
        """What the node says of itself, from now on."""
        said: list[dict[str, object]] = []

        async def listen() -> None:
            async with self.operator.subscribe(self.names.all_metrics) as messages:
                async for _, data in messages:
                    said.append(msgspec.json.decode(data))

        async with anyio.create_task_group() as listening:
            listening.start_soon(listen)
            yield said
            listening.cancel_scope.cancel()


@pytest.fixture
async def run(broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> ArmRun:
    roles = (Role.OPERATOR, Role.CONTROLLER, Role.TRAINER, Role.NODE)
    return ArmRun(settings, *[await open_role(role) for role in roles])


async def test_a_prompt_is_answered_by_the_arm_and_by_the_newest_weights_and_nothing_is_stored_to_train(
    run: ArmRun,
) -> None:
    await run.announce("1-4")
    await run.set_arms(ARM)
    await run.ask(1)
    await run.ask(2, question="hard")

    async with run.running_node(), run.reports() as said:
        easy, hard = await run.results(2)
        states = await run.operator.entries("server.", ServerState)
        await until(lambda: any("n0-arm_old_0" in str(report.get("servers")) for report in said))

    assert (easy.arm_id, easy.number, easy.pinned.index) == ("old-1", 1, 3)
    assert (easy.pinned.reward, easy.newest.reward) == (12.0, 12.0)
    assert (easy.pinned.oldest, easy.newest.oldest) == ("0-0", "1-4"), "its servers know no version"
    assert "too hard" in hard.pinned.error
    assert "too hard" in hard.newest.error
    assert await run.num_tickets() == 0
    assert await run.stored() == []
    assert list(states) == [run.names.server_key("n0-0")], "nobody waits for an arm's weights"


async def test_a_side_of_a_comparison_answers_alone_as_in_an_evaluation_of_so_many_answers(run: ArmRun) -> None:
    side = Pinned(name="compare_1_a", arm_id="compare_1_a-1", version="1-0", path=str(MODEL))
    await run.announce("1-4")
    await run.controller.put(ARMS, Arms(compared={side.name: side}))
    await run.ask(1, arm=side, num_samples=1)
    await run.ask(2, arm=side, question="hard", num_samples=2)
    await run.ask(3, arm=side, question="sampled", num_samples=1)
    await run.ask(4, arm=side, question="sampled", num_samples=2)

    async with run.running_node():
        easy, hard, greedy, drawn = await run.answers(4)

    assert (easy.arm_id, easy.number, easy.result.index, easy.result.reward) == ("compare_1_a-1", 1, 3, 12.0)
    assert easy.result.num_tokens == 12
    assert easy.text
    assert "too hard" in hard.result.error
    assert (greedy.result.reward, drawn.result.reward) == (0.0, 1.0), "the temperature"
    assert await run.results(0) == [], "no pair"
    assert await run.num_tickets(side) == 0


async def test_it_is_served_while_it_is_wanted_and_its_prompts_wait_where_it_is_not(run: ArmRun) -> None:
    other = msgspec.structs.replace(ARM, name="new", arm_id="new-1")
    await run.announce()
    await run.set_arms(ARM)
    await run.ask(1)
    await run.ask(1, arm=other)

    async with run.running_node():
        await run.results(1)
        assert await run.num_tickets(other) == 1

        await run.set_arms(ARM, other)
        await run.results(2)
        await run.set_arms(other)
        await run.ask(2, arm=other)
        results = await run.results(3)
        await run.ask(2)
        await anyio.sleep(0.5)
        assert await run.num_tickets() == 1

    assert {(result.arm_id, result.number) for result in results} == {("old-1", 1), ("new-1", 1), ("new-1", 2)}


async def test_an_arm_that_cannot_be_served_is_told_of_and_holds_nothing_up(run: ArmRun, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    lost = msgspec.structs.replace(ARM, path=str(folder))
    await run.announce()
    await run.set_arms(lost)
    await run.ask(1)

    async with run.running_node(), run.reports() as said:
        await run.admit(kind="score", question="easy")
        assert len(await run.slots(4)) == 4
        await until(lambda: any("arms.old.path" in str(report.get("arms")) for report in said))
        assert await run.num_tickets() == 1

        shutil.copytree(MODEL, folder)
        await run.results(1)


async def test_a_prompt_of_a_node_that_ends_goes_to_another(run: ArmRun, tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    (tmp_path / "play.py").write_text(HANGS_ONCE.format(marker=marker))
    await run.announce()
    await run.set_arms(ARM)
    await run.ask(1)
    async with run.running_node():
        await until(marker.exists)
    assert await run.num_tickets() == 1

    async with run.running_node():
        (result,) = await run.results(1)

    assert (result.pinned.reward, result.newest.reward) == (1.0, 1.0)


async def test_a_side_that_held_up_its_node_is_a_pair_without_rewards(
    run: ArmRun, settings: Settings, tmp_path: Path
) -> None:
    ticket = await run.ask(4)
    file = LoopBlockFile(tmp_path, "0")
    work = Work(workflow="play", name="row old-1.4.pinned", arm_ticket=ticket)
    file.write(LoopBlock(node_id="0", blocked_s=20.2, place="w.py:12 look", work=work))
    place = NodeContext(
        settings=settings, bus=run.node, node_id="0", generator=ScriptedModel(), codec=codec(), workflows={}
    )

    assert await recover(place, file) == {row_key(ticket)}

    (result,) = await run.results(1)
    assert "held up the event loop" in result.pinned.error
    assert "held up the event loop" in result.newest.error


async def test_arms_take_gpus_from_the_last_down_to_those_of_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, open_role: OpenRole, tmp_path: Path
) -> None:
    gpus = tuple("01234567")
    for module in ("areal_async.rollout.arms", "areal_async.inference.commands"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: gpus)
    monkeypatch.setattr(node_arms, "ROOM_POLL_S", 0.02)
    taken = 3
    started: list[tuple[str, int]] = []
    node = await open_role(Role.NODE)
    sized = settings.model_copy(update={"inference": settings.inference.model_copy(update={"tensor_parallel": 2})})
    served = NodeArms(node, sized, node_id="n0", log_directory=tmp_path, max_streams=8, num_gpus_taken=lambda: taken)

    async def serve(arm: Arm, first_gpu: int) -> str:
        started.append((arm.name, first_gpu))
        await anyio.sleep_forever()
        return ""

    monkeypatch.setattr(served, "_serve", serve)
    named = {name: msgspec.structs.replace(ARM, name=name, arm_id=f"{name}-1") for name in ("a", "b", "c")}
    controller = await open_role(Role.CONTROLLER)

    async def want(names: str) -> None:
        await controller.put(ARMS, Arms(by_name={name: named[name] for name in names}))

    async with anyio.create_task_group() as serving:
        serving.start_soon(served.run)
        await want("a")
        await until(lambda: started == [("a", 6)])
        await want("ab")
        await until(lambda: started[1:] == [("b", 4)])
        await want("abc")
        await until(lambda: served.hindrances == {"c": "no GPU of this node is free"})
        assert served.num_gpus == 4
        assert most_servers(sized, num_gpus_lent=served.num_gpus) == 2
        await want("bc")
        await until(lambda: started[2:] == [("c", 6)])
        serving.cancel_scope.cancel()
