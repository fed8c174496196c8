"""However user code ends, there is a trajectory that says so."""

import asyncio
import gc
import math
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from areal_async.api import Policy, Workflow
from areal_async.errors import FencedError, Reject, RewardError
from areal_async.protocol.types import Prompt, SlotStatus, Trajectory
from areal_async.protocol.wire import BYTES_PER_TOKEN
from areal_async.rollout import workflow_call
from areal_async.rollout.user_code import task_scope
from areal_async.rollout.user_code.task_scope import shared
from tests.unit.rollout.byte_model import END, ScriptedModel
from tests.unit.rollout.called import call_of, fill_one, policy_of, slot_of

pytestmark = pytest.mark.anyio


async def play(
    workflow: Workflow,
    *,
    version: str = "1-2",
    max_bytes: int = 1 << 20,
    max_sequence_tokens: int = 100,
    deadline_s: float = 60.0,
) -> Trajectory:
    model = ScriptedModel([98, END], [99], version=version, finish_reason="length")
    slot = slot_of(3, max_bytes=max_bytes, max_sequence_tokens=max_sequence_tokens)
    return await fill_one(workflow, policy_of(model), slot, deadline_s=deadline_s)


def ending(action: Any) -> Workflow:
    """A workflow that calls the model once and then returns or raises what it is given."""

    async def workflow(prompt: Prompt, policy: Policy) -> Any:
        await policy.complete([1, 2])
        if isinstance(action, BaseException):
            raise action
        return action

    return workflow


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.5, 0.5),
        (True, 1.0),
        (0, 0.0),
        (-2, -2.0),
        (np.bool_(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0),
    ],
)
async def test_number_is_the_reward(returned: Any, reward: float) -> None:
    trajectory = await play(ending(returned))

    assert (trajectory.slot.status, trajectory.slot.reward, trajectory.slot.reason) == ("scored", reward, "")
    assert (trajectory.slot.num_tokens, trajectory.slot.num_output_tokens, trajectory.slot.num_truncated) == (4, 2, 1)
    assert (trajectory.slot.oldest, trajectory.slot.newest, trajectory.slot.sibling) == ("1-2", "1-2", 3)
    assert len(trajectory.sequences) == 1


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (ValueError("bad\nthing"), "workflow w: ValueError: bad thing"),
        (KeyError("answer"), "workflow w: KeyError: 'answer'"),
        (RewardError("reward r: raised: no"), "reward r: raised: no"),
        (ExceptionGroup("g", [ValueError("inside")]), "workflow w: ValueError: inside"),
        (
            ExceptionGroup("g", [Reject("why"), ExceptionGroup("h", [ValueError("x"), OSError("y")]), KeyError("z")]),
            "workflow w: ValueError: x (and 2 more errors)",
        ),
        (ExceptionGroup("g", [Reject("why"), RewardError("reward r: raised: no")]), "reward r: raised: no"),
        (None, "workflow w: returned None, need a float"),
        (math.nan, "workflow w: returned nan, need a finite number"),
        (math.inf, "workflow w: returned inf, need a finite number"),
        ("1.0", "workflow w: returned '1.0', need a float"),
        (np.array([0.5]), "workflow w: returned array([0.5]), need a float"),
        (np.array("1.0"), "workflow w: returned array('1.0', dtype='<U3'), need a float"),
        (torch.tensor(math.nan), "workflow w: returned tensor(nan), need a finite number"),
        ({"other.1": 1.0}, "workflow w: got rewards for replies ['other.1'], need ids out of ['uid.1']"),
        ({}, "workflow w: got rewards for replies [], need ids"),
        (SystemExit(3), "workflow w: called sys.exit(3)"),
    ],
)
async def test_what_is_no_reward_is_a_failed_slot_with_its_cause(action: Any, reason: str) -> None:
    trajectory = await play(ending(action))

    assert trajectory.slot.status is SlotStatus.FAILED
    assert trajectory.slot.reason.startswith(reason)
    assert (trajectory.slot.reward, trajectory.slot.num_tokens, trajectory.sequences) == (0.0, 0, [])
    assert trajectory.slot.oldest == "1-2"


async def test_what_was_not_awaited_is_a_failed_slot_that_says_so() -> None:
    """And Python has nothing left to warn of."""

    async def score() -> float:
        return 1.0

    async def workflow(prompt: Prompt, policy: Policy) -> Any:
        await policy.complete([1, 2])
        return score()

    async def noting(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        policy.info["share"] = score()  # type: ignore[assignment]
        return 1.0

    told = "score(...), which was not awaited; write await before the call"
    assert (await play(workflow)).slot.reason == f"workflow w: returned {told}"
    assert (await play(noting)).slot.reason == f"workflow w: got policy.info['share'] {told}"


async def test_a_cancellation_that_escapes_from_user_code_is_its_failure_and_stops_no_sibling() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task
        return 1.0

    async with anyio.create_task_group() as siblings:
        trajectory = await play(workflow)
        assert not siblings.cancel_scope.cancel_called

    assert trajectory.slot.status is SlotStatus.FAILED
    assert "CancelledError" in trajectory.slot.reason


@pytest.mark.parametrize(
    "reject",
    [Reject("why"), ExceptionGroup("g", [Reject("why")]), ExceptionGroup("g", [Reject("why"), Reject("too")])],
)
async def test_reject_withdraws_the_sibling(reject: Exception) -> None:
    trajectory = await play(ending(reject))

    assert (trajectory.slot.status, trajectory.slot.reason) == (SlotStatus.REJECTED, "why")


async def test_workflow_that_never_called_the_model_failed_with_the_tickets_version() -> None:
    async def lazy(prompt: Prompt, policy: Policy) -> float:
        return 1.0

    trajectory = await play(lazy)

    assert trajectory.slot.reason.startswith("workflow w: returned without a call of the model")
    assert (trajectory.slot.oldest, trajectory.slot.newest) == ("1-1", "1-1")


async def test_workflow_past_its_deadline_is_a_failed_slot() -> None:
    async def slow(prompt: Prompt, policy: Policy) -> float:
        await anyio.sleep_forever()
        return 1.0

    assert (await play(slow, deadline_s=0.05)).slot.reason == "workflow w: ran past rollout.episode_deadline_s = 0.05 s"


async def test_trajectory_over_the_limit_is_a_failed_slot() -> None:
    trajectory = await play(ending(1.0), max_bytes=100)

    assert trajectory.slot.status is SlotStatus.FAILED
    assert "need at most rollout.max_trajectory_bytes = 100" in trajectory.slot.reason
    assert trajectory.sequences == []


async def test_sequence_no_trainer_could_pack_is_a_failed_slot_instead_of_the_end_of_the_run() -> None:
    assert (await play(ending(1.0), max_sequence_tokens=4)).slot.status is SlotStatus.SCORED

    trajectory = await play(ending(1.0), max_sequence_tokens=3)

    assert trajectory.slot.reason == "trajectory: got a sequence of 4 tokens, need at most trainer.token_budget = 3"


async def test_trajectory_of_64_megabytes_is_refused_before_anything_is_made_of_it() -> None:
    num_tokens = (64 << 20) // BYTES_PER_TOKEN
    prompt_ids = [7] * num_tokens

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete(prompt_ids)
        tracemalloc.start()
        return 1.0

    try:
        trajectory = await play(workflow, max_bytes=8 << 20, max_sequence_tokens=num_tokens + 2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert "bytes or more, need at most rollout.max_trajectory_bytes" in trajectory.slot.reason
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    "error", [FencedError("gone"), ExceptionGroup("g", [RewardError("no"), ValueError("x"), FencedError("gone")])]
)
async def test_error_that_ends_the_process_is_not_swallowed(error: Exception) -> None:
    with pytest.raises(FencedError):
        await play(ending(error))


async def test_cancellation_is_not_swallowed() -> None:
    async def wait(prompt: Prompt, policy: Policy) -> float:
        scope.cancel()
        await anyio.sleep_forever()
        return 1.0

    with anyio.CancelScope() as scope:
        await play(wait)
        raise AssertionError("it went on")

    assert scope.cancelled_caught


async def test_numbers_of_the_workflow_travel_beside_those_of_the_system() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        policy.info["num_hints"] = 2
        policy.info["is_short"] = True
        policy.info["num_turns"] = 7
        return 1.0

    info = (await play(workflow)).info

    assert info.pop("rollout/duration_s") >= 0
    own = {"rollout/num_turns": 1.0, "rollout/num_sequences": 1.0, "rollout/num_breaks": 0.0}
    assert info == {**own, "num_hints": 2.0, "is_short": 1.0, "num_turns": 7.0}, "no word is taken from a workflow"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"x": math.nan}, "workflow w: got policy.info['x'] nan, need a finite number"),
        ({"x": 10**400}, "workflow w: got policy.info['x'] 1000"),
        ({"x": 1e31}, "workflow w: got policy.info['x'] 1e+31, need at most 1e+30"),
        ({"x": "1"}, "workflow w: got policy.info['x'] '1', need a number"),
        ({"x": None}, "workflow w: got policy.info['x'] None, need a number"),
        ({3: 1.0}, "workflow w: got policy.info[3], need a name"),
        ({"a b": 1.0}, "workflow w: got policy.info['a b'], need a name"),
        ({"rollout/num_turns": 1.0}, "workflow w: got policy.info['rollout/num_turns'], need a name"),
        ({f"x{number}": 1.0 for number in range(65)}, "workflow w: got policy.info {"),
        (None, "workflow w: got policy.info None"),
    ],
)
async def test_numbers_that_are_none_fail_the_slot_with_their_name(info: Any, reason: str) -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        policy.info = info
        return 1.0

    trajectory = await play(workflow)

    assert trajectory.slot.status is SlotStatus.FAILED
    assert trajectory.slot.reason.startswith(reason)


async def test_reward_beyond_all_floats_is_no_reward() -> None:
    assert (await play(ending(10**400))).slot.reason.endswith("need a finite number")


async def test_each_sibling_has_a_row_of_its_own_and_nothing_else_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[object] = []
    monkeypatch.setattr(workflow_call, "deepcopy", lambda value: copied.append(value) or deepcopy(value))
    seen: list[Prompt] = []

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        seen.append(prompt)
        prompt.row["options"].append("c")
        return float(len((await policy.complete([1])).text))

    prompt = Prompt(epoch=1, index=2, row={"options": ["a", "b"]})
    for _ in range(2):
        await call_of(workflow, [policy_of(ScriptedModel([98, END]))]).fill(prompt, [slot_of(0)])

    assert [one.row["options"] for one in seen] == [["a", "b", "c"]] * 2
    assert [(one.epoch, one.index) for one in seen] == [(1, 2)] * 2
    assert prompt.row == {"options": ["a", "b"]}
    assert copied == [prompt.row] * 2


async def test_a_workflow_that_outlives_its_deadline_and_its_end_is_late_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_scope, "GRACE_S", 0.05)
    may_end = anyio.Event()

    async def go_on() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                pass

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        with shared():
            task = asyncio.create_task(go_on())
        await task
        return 1.0

    try:
        trajectory = await play(workflow, deadline_s=0.05)
    finally:
        may_end.set()

    assert trajectory.slot.reason == "workflow w: ran past rollout.episode_deadline_s = 0.05 s"


USER = [{"role": "user", "content": "q"}]


async def _complete(policy: Policy) -> object:
    await policy.complete([1, 2])
    return 1.0


async def _chat(policy: Policy) -> object:
    await policy.chat(USER)
    return 1.0


async def _stream(policy: Policy) -> object:
    async with policy.stream(USER) as stream:
        assert [piece async for piece in stream] == ["b", "c"]
    return 1.0


async def _stream_in_part(policy: Policy) -> object:
    await policy.complete([1, 2])
    await anext(policy.stream(USER))
    return 1.0


async def _reject(policy: Policy) -> object:
    raise Reject("too easy")


async def _raise(policy: Policy) -> object:
    try:
        await policy.complete([1, 2])
        raise KeyError("inner")
    except KeyError as exc:
        raise ExceptionGroup("outer", [ValueError(exc)]) from exc


@dataclass(frozen=True)
class FrozenError(Exception):
    """Lets nobody set an attribute of it."""

    number: int


async def _raise_frozen(policy: Policy) -> object:
    raise FrozenError(3)


async def _return_nothing(policy: Policy) -> object:
    return None


async def _wait(policy: Policy) -> object:
    await anyio.sleep_forever()
    return 1.0


async def _ask_too_much(policy: Policy) -> object:
    await policy.complete([1, 2], temperature=-1.0)
    return 1.0


@pytest.mark.parametrize(
    ("play_out", "status"),
    [
        (_complete, SlotStatus.SCORED),
        (_chat, SlotStatus.SCORED),
        (_stream, SlotStatus.SCORED),
        (_stream_in_part, SlotStatus.SCORED),
        (_reject, SlotStatus.REJECTED),
        (_raise, SlotStatus.FAILED),
        (_raise_frozen, SlotStatus.FAILED),
        (_return_nothing, SlotStatus.FAILED),
        (_wait, SlotStatus.FAILED),
        (_ask_too_much, SlotStatus.FAILED),
    ],
)
async def test_a_call_that_is_over_leaves_nothing_to_the_garbage_collector(
    play_out: Callable[[Policy], Awaitable[object]], status: SlotStatus
) -> None:
    policies: list[weakref.ref[Policy]] = []

    async def workflow(prompt: Prompt, policy: Policy) -> object:
        policies.append(weakref.ref(policy))
        return await play_out(policy)

    model = ScriptedModel(*[[98, 99, END]] * 2)
    gc.collect()
    gc.disable()
    try:
        trajectory = await fill_one(workflow, policy_of(model), slot_of(0), deadline_s=0.1 if play_out is _wait else 60)
        await anyio.wait_all_tasks_blocked()
        assert [reference() for reference in policies] == [None]
    finally:
        gc.enable()
    assert trajectory.slot.status == status
