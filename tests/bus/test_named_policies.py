"""A node with a frozen policy and a role: what is stored and evaluated, and what the run is told of its servers."""

import sys
from pathlib import Path

import pytest

from areal_async.bus import EmbeddedBroker, Role
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    InferenceSettings,
    ModelSettings,
    PolicySettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    Settings,
    TaskSettings,
)
from areal_async.errors import UserError, leaves_of
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import SlotStatus
from tests.brokers import PATIENCE_S, OpenRole
from tests.bus.test_node import MODEL, TESTS, Run, ask

pytestmark = pytest.mark.anyio

WORKFLOW = """
async def play(prompt, policy, opponent, judge):
    first = await policy.complete([5, 6, 7])
    second = await opponent.complete([8, 9])
    verdict = await judge.complete([10, 11], temperature=0.5)
    policy.info["num_judged"] = len(verdict.token_ids)
    return {first.id: 3.0, second.id: 1.0}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fakes'}:{TESTS.parent}")
    workflow = tmp_path / "play.py"
    workflow.write_text(WORKFLOW)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path / "runs"),
        tasks=(TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="none")),),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        policies={"opponent": PolicySettings(), "judge": PolicySettings(path=str(MODEL))},
        rollout=RolloutSettings(
            group_size=4,
            min_group_size=2,
            sampling=SamplingSettings(max_new_tokens=16),
            max_stream_bytes=2 << 20,
            max_trajectory_bytes=1 << 16,
        ),
        inference=InferenceSettings(backend="sglang", python=Path(sys.executable), start_deadline_s=PATIENCE_S),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


@pytest.fixture
async def run(broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> Run:
    return Run(settings, *[await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.TRAINER, Role.NODE)])


async def test_role_is_stored_with_the_trajectory_and_the_frozen_model_is_not(run: Run) -> None:
    await run.announce()
    await run.admit()

    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()
        states = await run.operator.entries("server.", ServerState)

    assert {(slot.status, slot.oldest, slot.newest, slot.num_output_tokens) for slot in slots} == {
        (SlotStatus.SCORED, "1-0", "1-0", 24)
    }, "the frozen model's version 0-0 is no version of any token"
    trajectories = [trajectory for _, found in await run.stored() for trajectory in found]
    for trajectory in trajectories:
        assert [sequence.token_ids[:3].tolist()[:2] for sequence in trajectory.sequences] == [[5, 6], [8, 9]]
        assert trajectory.info["num_judged"] == 12.0
    assert list(states) == [run.names.server_key("n0-0")], "nobody is to wait for a frozen server's weights"


async def test_evaluation_takes_the_policies_too_and_has_roles_answer_greedily(run: Run) -> None:
    await run.announce()
    ticket = EvalTicket(eval_id="1-0", index=3, workflow="play", row={})
    await run.controller.publish(run.names.eval_tickets("play"), ticket, msg_id="e3")

    async with run.running_node():
        async for message in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            result = wire.decode(message.data, EvalResult)
            break
        asked = await ask((await run.server(lambda state: True)).url, "/model_info")

    assert (result.error, result.oldest) == ("", "1-0")
    assert [params["temperature"] for params in asked["sampling_params"]] == [0.0, 0.0], "the judge is elsewhere"


async def test_node_refuses_a_policy_that_nobody_takes(run: Run, settings: Settings) -> None:
    idle = settings.model_copy(update={"policies": {**settings.policies, "critic": PolicySettings()}})

    with pytest.raises(ExceptionGroup) as caught:
        async with run.running_node(idle):
            await run.slots(1)

    (cause,) = leaves_of(caught.value)
    assert isinstance(cause, UserError)
    assert "policies.critic: no workflow of this run takes it" in str(cause)


PER_NODE = """
from pathlib import Path

from areal_async import per_node

EVENTS = Path(__file__).with_suffix(".events")


def note(event):
    with EVENTS.open("a") as file:
        print(event, file=file)


@per_node
async def table():
    note("up")
    yield note
    note("down")


async def play(prompt, policy, table):
    await policy.complete([5, 6, 7])
    table("played")
    return 1.0
"""


async def test_what_is_made_once_per_node_is_there_for_all_trajectories_and_ended_with_the_node(
    run: Run, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "at_table.py").write_text(PER_NODE)
    task = settings.tasks[0].model_copy(update={"workflow": f"{tmp_path / 'at_table.py'}:play"})
    await run.announce()
    await run.admit()

    async with run.running_node(settings.model_copy(update={"tasks": (task,), "policies": {}})):
        slots = await run.slots(4)
        assert (tmp_path / "at_table.events").read_text().split() == ["up", *["played"] * 4]

    assert {slot.status for slot in slots} == {SlotStatus.SCORED}
    assert (tmp_path / "at_table.events").read_text().split() == ["up", *["played"] * 4, "down"]
