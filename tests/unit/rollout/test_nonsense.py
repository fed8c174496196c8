"""A workflow, a tool or a reward may do anything: its slot says what, the node goes on, nothing of it stays behind."""

import asyncio
import contextvars
import math
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import anyio
import pytest
import structlog

from areal_async.api import Policy, ToolCall, Workflow
from areal_async.errors import Reject, RewardError, WorkflowError
from areal_async.protocol.types import Prompt, SlotStatus, Ticket, Trajectory
from areal_async.protocol.wire import decode_headers, encode_message
from areal_async.rollout.tools.run import Toolbox
from areal_async.rollout.user_code import task_scope
from tests.unit.rollout import sample_rewards
from tests.unit.rollout.byte_model import END, ScriptedModel
from tests.unit.rollout.called import fill_one, policy_of, slot_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scope, "GRACE_S", 0.05)


async def play(workflow: Workflow, *, deadline_s: float = 5.0) -> Trajectory:
    """Run one sibling and check what holds whatever it does."""
    before = asyncio.all_tasks()
    policy = policy_of(ScriptedModel(*[[98, END]] * 9))
    trajectory = await fill_one(workflow, policy, slot_of(3), deadline_s=deadline_s)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before, "nothing of it runs any more"
    payload, headers, _ = encode_message(
        [trajectory], Ticket(row={}, group_id="0-0-0", workflow="w", version="1-1", group_size=4)
    )
    stored = decode_headers(headers, sequence=1, num_bytes=len(payload))
    assert stored.slots[0].reason == trajectory.slot.reason, "it can be stored, and read"
    return trajectory


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not a word")


class Panic(BaseException):
    """As libraries written in Rust raise it."""


class Lying(float):
    def __float__(self) -> float:
        raise OSError("no number here")


class Shy:
    def __repr__(self) -> str:
        raise OSError("no looking")


class Bottomless(Mapping[str, float]):
    def __getitem__(self, key: str) -> float:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise OSError("nothing in it")

    def __len__(self) -> int:
        return 1


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


def returns(value: Any) -> Workflow:
    async def workflow(prompt: Prompt, policy: Policy) -> Any:
        await policy.complete([1])
        return value

    return workflow


def does(action: Callable[[], Any]) -> Workflow:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        action()
        await asyncio.sleep(0)
        return 1.0

    return workflow


def raising(error: BaseException) -> Workflow:
    def action() -> None:
        raise error

    return does(action)


def nested(error: Exception, *, depth: int) -> Exception:
    for _ in range(depth):
        error = ExceptionGroup("g", [error])
    return error


def cancel_myself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


def close_the_loop() -> None:
    asyncio.get_running_loop().close()


@pytest.mark.parametrize(
    ("workflow", "reason"),
    [
        pytest.param(raising(KeyboardInterrupt()), "workflow w: KeyboardInterrupt", id="KeyboardInterrupt"),
        pytest.param(raising(SystemExit(3)), "workflow w: called sys.exit(3)", id="SystemExit"),
        pytest.param(raising(GeneratorExit()), "workflow w: GeneratorExit", id="GeneratorExit"),
        pytest.param(raising(Panic("in Rust")), "workflow w: Panic: in Rust", id="BaseException"),
        pytest.param(raising(StopIteration(1)), "workflow w: RuntimeError: coroutine raised StopIteration", id="stop"),
        pytest.param(raising(asyncio.CancelledError()), "let a CancelledError escape", id="CancelledError"),
        pytest.param(
            raising(BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("x")])),
            "workflow w: KeyboardInterrupt (and 1 more error)",
            id="group",
        ),
        pytest.param(
            raising(nested(ExceptionGroup("g", [ValueError("x"), KeyError("y")]), depth=5000)),
            "workflow w: ValueError: x (and 1 more error)",
            id="group of errors, nested deeply",
        ),
        pytest.param(raising(Mute()), "workflow w: Mute", id="error that raises when it is read"),
        pytest.param(raising(ValueError("\ud800 half")), "workflow w: ValueError: ? half", id="half a character"),
        pytest.param(raising(ValueError("x" * 10**7)), "workflow w: ValueError: xxx", id="endless message"),
        pytest.param(raising(WorkflowError("\ud800" * 10**6)), "???", id="endless message of ours"),
        pytest.param(does(lambda: recurse(0)), "workflow w: RecursionError", id="recursion"),
        pytest.param(does(cancel_myself), "let a CancelledError escape", id="cancels itself"),
        pytest.param(does(stop_the_loop), "workflow w: called loop.stop()", id="stops the loop"),
        pytest.param(does(close_the_loop), "workflow w: RuntimeError: Cannot close a running", id="closes the loop"),
        pytest.param(returns(None), "workflow w: returned None, need a float", id="None"),
        pytest.param(returns(math.nan), "workflow w: returned nan, need a finite number", id="NaN"),
        pytest.param(returns(1e400), "workflow w: returned inf, need a finite number", id="1e400"),
        pytest.param(returns(10**400), "need a finite number", id="10**400"),
        pytest.param(returns(10**5000), "need a finite number", id="10**5000"),
        pytest.param(returns("1.0"), "workflow w: returned '1.0', need a float", id="text"),
        pytest.param(returns("x" * 10**8), "workflow w: returned 'xxx", id="100 MB of text"),
        pytest.param(returns([1] * 10**7), "workflow w: returned [1, 1, 1", id="large list"),
        pytest.param(returns(Shy()), "workflow w: returned <Shy", id="object that cannot be shown"),
        pytest.param(returns(Lying(1.0)), "workflow w: OSError: no number here", id="number that is none"),
        pytest.param(returns(Bottomless()), "workflow w: OSError: nothing in it", id="mapping that is none"),
        pytest.param(returns({"uid.1": None}), "workflow w: returned None, need a float", id="None for a reply"),
        pytest.param(returns(asyncio), "workflow w: returned <module 'asyncio'", id="module"),
    ],
)
async def test_what_a_workflow_raises_or_returns_is_in_its_slot(workflow: Workflow, reason: str) -> None:
    slot = (await play(workflow)).slot

    assert slot.status is SlotStatus.FAILED
    assert reason in slot.reason
    assert len(slot.reason) <= 1000


async def test_a_task_of_a_workflow_that_ends_the_process_ends_itself() -> None:
    async def leave() -> None:
        sys.exit(3)

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
        return 1.0

    assert (await play(workflow)).slot.reason == "workflow w: called sys.exit(3)"


async def test_a_workflow_that_hangs_ends_at_its_deadline() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await anyio.sleep_forever()
        return 1.0

    assert "ran past rollout.episode_deadline_s = 0.05 s" in (await play(workflow, deadline_s=0.05)).slot.reason


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what ignores its end, and says so
@pytest.mark.parametrize("swallowed", [asyncio.CancelledError, BaseException])
async def test_a_workflow_that_swallows_its_cancellation_is_ended_all_the_same(
    swallowed: type[BaseException],
) -> None:
    num_swallowed = 0

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        nonlocal num_swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except swallowed:
                num_swallowed += 1

    slot = (await play(workflow, deadline_s=0.05)).slot

    assert "ran past rollout.episode_deadline_s = 0.05 s" in slot.reason
    assert num_swallowed <= 4


async def test_what_a_workflow_leaves_running_is_cancelled_and_told_of_and_has_no_policy_any_more() -> None:
    refused = []

    async def call_late(policy: Policy) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            try:
                await policy.complete([1])
            except WorkflowError as exc:
                refused.append(str(exc))

    async def start_more() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            asyncio.create_task(start_more())

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        asyncio.create_task(call_late(policy))
        asyncio.create_task(start_more())
        await asyncio.sleep(0)
        return 1.0

    with structlog.testing.capture_logs() as logs:
        slot = (await play(workflow)).slot

    assert (slot.status, slot.num_output_tokens) == ("scored", 2)
    assert refused == ["policy call: got one after the end of its trajectory; await what the workflow starts"]
    told = next(line for line in logs if line["event"] == "workflow.left_tasks")
    assert (told["num_tasks"], told["owner"]) == (2, "workflow w")
    assert [name.rpartition(".")[2] for name in told["tasks"]] == ["call_late", "start_more"]


async def test_a_task_that_swallows_its_cancellation_is_ended_with_its_trajectory() -> None:
    async def stay() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        asyncio.create_task(stay())
        await asyncio.sleep(0)
        return 1.0

    assert (await play(workflow)).slot.status is SlotStatus.SCORED


async def test_streams_and_generators_that_are_left_open_are_closed_without_a_word() -> None:
    async def pieces() -> AsyncIterator[int]:
        while True:
            yield 1

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        async for _ in policy.stream([{"role": "user", "content": "hi"}]):
            break
        async for _ in pieces():
            break
        return 1.0

    with structlog.testing.capture_logs() as logs:
        slot = (await play(workflow)).slot

    assert slot.status is SlotStatus.SCORED
    assert not logs


async def test_what_is_started_in_nobodys_name_outlives_the_trajectory() -> None:
    shared = []

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        loop = asyncio.get_running_loop()
        shared.append(loop.create_task(asyncio.sleep(60), context=contextvars.Context()))
        return 1.0

    with pytest.raises(AssertionError, match="nothing of it runs any more"):
        await play(workflow)

    assert not shared[0].done()
    shared[0].cancel()


async def test_what_a_workflow_does_to_what_it_was_given_is_not_trained() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        messages = [{"role": "user", "content": "hi"}]
        reply = await policy.chat(messages)
        reply.token_ids.clear()
        reply.logprobs.append(0.0)
        messages.clear()
        reply.message.clear()
        prompt.row.clear()
        return 1.0

    trajectory = await play(workflow)

    assert trajectory.slot.status is SlotStatus.SCORED
    (sequence,) = trajectory.sequences
    assert [int(token) for token in sequence.token_ids[sequence.loss_mask]] == [98, END]


@pytest.mark.parametrize("info", [Bottomless(), {"x": Lying(1.0)}, {"x": 10**5000}, {Shy(): 1.0}, Shy()])
async def test_info_that_is_nonsense_is_in_the_slot(info: Any) -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        policy.info = info
        return 1.0

    slot = (await play(workflow)).slot

    assert slot.status is SlotStatus.FAILED
    assert "policy.info" in slot.reason


@pytest.mark.parametrize("reason", [Mute(), "\ud800", "", None, "x" * 10**7])
async def test_a_workflow_may_withdraw_for_any_reason(reason: Any) -> None:
    assert (await play(raising(Reject(reason)))).slot.status is SlotStatus.REJECTED


# Tools


def leave() -> None:
    raise SystemExit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def panic() -> None:
    raise Panic("in Rust")


def cancelled() -> None:
    raise asyncio.CancelledError


async def leave_async() -> None:
    sys.exit(3)


async def interrupt_async() -> None:
    raise KeyboardInterrupt


async def panic_async() -> None:
    raise Panic("in Rust")


async def generator_exit_async() -> None:
    raise GeneratorExit


async def cancel_myself_async() -> None:
    cancel_myself()
    await asyncio.sleep(0)


async def leak_async() -> str:
    asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    return "fine"


async def swallow_async() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


def large() -> list[int]:
    return [1] * 10**6


def half_a_character() -> str:
    return "\ud800"


def shy() -> Any:
    return Shy()


def nothing() -> None:
    return None


def infinite() -> float:
    return 1e400


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def daemonless() -> str:
    threading.Thread(target=lambda: None).start()
    return "fine"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (leave, "error: leave: called sys.exit(3)"),
        (interrupt, "error: interrupt: KeyboardInterrupt"),
        (panic, "error: panic: Panic: in Rust"),
        (cancelled, "error: cancelled: CancelledError"),
        (leave_async, "error: workflow w: called sys.exit(3)"),
        (interrupt_async, "error: workflow w: KeyboardInterrupt"),
        (panic_async, "error: panic_async: Panic: in Rust"),
        (generator_exit_async, "error: generator_exit_async: GeneratorExit"),
        (cancel_myself_async, "error: cancel_myself_async: let a CancelledError escape"),
        (leak_async, "fine"),
        (swallow_async, "error: swallow_async: no answer within 0.2 s"),
        (large, "[1,1,1"),
        (half_a_character, "?"),
        (shy, "error: shy: OSError: no looking"),
        (nothing, "null"),
        (infinite, "null"),
        (recursive, "[[...]]"),
        (set_alarm, "error: set_alarm: ValueError: signal only works in main thread"),
        (daemonless, "fine"),
    ],
)
async def test_whatever_a_tool_does_is_told_to_the_model(tool: Callable[..., Any], text: str) -> None:
    told = []

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1])
        call = ToolCall(id="call00001", name=tool.__name__, arguments={})
        (result,) = await Toolbox([tool], timeout_s=0.2 if tool is swallow_async else 10.0).run([call])
        told.append(result.text)
        return 1.0

    slot = (await play(workflow)).slot

    assert slot.status is SlotStatus.SCORED
    assert told[0].startswith(text)
    assert len(told[0]) < 21_000


# Rewards, in their worker processes


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("exit", "raised: called sys.exit(3)"),
        ("interrupt", "raised: KeyboardInterrupt"),
        ("panic", "raised: Panic: in Rust"),
        ("kill", "its worker died with status -9"),
        ("leave", "its worker died with status 7"),
        ("none", "returned None, need a finite number"),
        ("nan", "returned nan, need a finite number"),
        ("1e400", "returned inf, need a finite number"),
        ("10**400", "need a finite number"),
        ("not awaited", "returned later(...), which was not awaited; write await before the call"),
        ("text", "returned '1.0', need a finite number"),
        ("flood", "returned 'xxx"),
        ("no words", "RewardError"),
        ("no reason", "Reject"),
        ("half", "raised: ValueError: ?"),
        ("closed", "its worker died with status"),
        ("recursion", "raised: RecursionError"),
        ("hold the interpreter", "ran past 2 s and was killed"),
    ],
)
async def test_whatever_a_reward_does_is_an_error_and_never_a_zero(kind: str, reason: str) -> None:
    with pytest.raises(RewardError) as caught:
        await sample_rewards.nonsense(kind)

    assert str(caught.value).startswith("reward nonsense: ")
    assert reason in str(caught.value)
    assert await sample_rewards.length_of("ok") == 2.0


async def test_a_reward_that_leaves_threads_and_output_behind_is_scored() -> None:
    assert await sample_rewards.nonsense("leaks") == 1.0
    assert await sample_rewards.length_of("ok") == 2.0


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(SystemExit(3), "called sys.exit(3)"), (KeyboardInterrupt("enough"), "KeyboardInterrupt: enough")],
)
async def test_shared_task_that_would_end_the_process_fails_who_awaits_it(raised: BaseException, reason: str) -> None:
    async def helper() -> None:
        await asyncio.sleep(0)
        raise raised

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        with task_scope.shared():
            task = asyncio.ensure_future(helper())
        await task
        return 1.0

    trajectory = await fill_one(workflow, policy_of(ScriptedModel([98, END])), slot_of(0))

    assert trajectory.slot.status is SlotStatus.FAILED
    assert trajectory.slot.reason == f"shared by workflow w: {reason}"


async def test_what_all_trajectories_share_outlives_the_one_that_opened_it() -> None:
    opened: list[asyncio.Task[None]] = []

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        with task_scope.shared():
            opened.append(asyncio.ensure_future(asyncio.sleep(60)))
        return 1.0

    trajectory = await fill_one(workflow, policy_of(ScriptedModel([98, END])), slot_of(0))
    await asyncio.sleep(0.1)

    assert trajectory.slot.status is SlotStatus.SCORED
    assert not opened[0].done()
    opened[0].cancel()
