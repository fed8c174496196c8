"""A reward runs in a process that can be killed; whatever goes wrong there is a RewardError with its cause."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from areal_async import reward
from areal_async.errors import RewardError, UserError
from tests.brokers import until
from tests.unit.rollout import sample_rewards

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]


async def test_plain_function_becomes_awaitable_and_keeps_its_name() -> None:
    assert await sample_rewards.length_of("four") == 4.0
    assert await sample_rewards.is_longer("long", than=["a", "bcd"]) == 1.0
    assert sample_rewards.length_of.__name__ == "length_of"  # type: ignore[attr-defined]


async def test_hanging_reward_is_killed_with_all_it_started_and_the_next_call_works(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"

    with pytest.raises(RewardError, match=r"reward hang: ran past 1 s and was killed"):
        await sample_rewards.hang(str(pid_file))

    worker, child = map(int, pid_file.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    await until(lambda: not is_running(child))
    assert await sample_rewards.length_of("ok") == 2.0


@pytest.mark.parametrize("then", ["return", "raise", "hang", "die", "keep"])
async def test_a_daemon_ends_with_the_call_that_started_it(tmp_path: Path, then: str) -> None:
    with suppress(RewardError):
        await sample_rewards.leave_daemon(str(tmp_path / "pid"), then)

    assert not is_running(int((tmp_path / "pid").read_text()))
    assert await sample_rewards.length_of("ok") == 2.0


async def test_a_daemon_ends_with_the_node_that_was_killed(tmp_path: Path) -> None:
    source = f"""
import asyncio
from tests.unit.rollout.sample_rewards import leave_daemon
asyncio.run(leave_daemon({str(tmp_path / "pid")!r}, "hang"))
"""
    command = [sys.executable, "-c", source]
    async with await anyio.open_process(command, stdin=None, stdout=None, stderr=None, cwd=ROOT) as node:
        await until((tmp_path / "pid").exists, within_s=60)
        node.kill()
    await until(lambda: not is_running(int((tmp_path / "pid").read_text())))


async def test_a_helper_of_the_worker_lives_from_call_to_call() -> None:
    assert max([await sample_rewards.ask_helper() for _ in range(5)]) >= 3.0, "of two workers, one is asked three times"


async def test_what_was_prepared_outlives_the_calls_though_it_left_the_session() -> None:
    assert [await sample_rewards.has_server() for _ in range(5)] == [1.0] * 5


def is_running(pid: int) -> bool:
    """Whether it still runs; a killed orphan may stay a zombie until somebody collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample_rewards.fail("it"), "reward fail: raised: ValueError: cannot read it"),
        (lambda: sample_rewards.nothing(), "reward nothing: returned None, need a finite number"),
        (lambda: sample_rewards.not_a_number(), "reward not_a_number: returned nan, need a finite number"),
        (lambda: sample_rewards.text_instead("1.0"), "reward text_instead: returned '1.0', need a finite number"),
        (lambda: sample_rewards.die(), "reward die: its worker died with status 7"),
        (lambda: sample_rewards.length_of(object()), "reward length_of: cannot send its arguments"),  # type: ignore[arg-type]
    ],
)
async def test_reward_that_fails_is_an_error_with_its_cause(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=message):
        await call()


async def test_what_a_reward_prints_or_reads_does_not_disturb_its_answer() -> None:
    assert await sample_rewards.noisy() == 0.5


async def test_worker_imports_no_model_library() -> None:
    assert await sample_rewards.has_torch() == 0.0


async def test_workers_stay_warm() -> None:
    processes = {await sample_rewards.process_id() for _ in range(20)}

    assert len(processes) <= 2


async def test_preparing_is_done_once_and_not_counted() -> None:
    """Preparing takes longer than a call may."""
    assert [await sample_rewards.times_prepared() for _ in range(5)] == [1.0] * 5
    assert not sample_rewards.PREPARED, "not here"


async def test_a_reward_that_cannot_be_prepared_is_an_error() -> None:
    with pytest.raises(RewardError, match="reward unprepared: preparing unprepared: ImportError: no such module"):
        await sample_rewards.unprepared()


async def test_cancelled_call_returns_at_once_and_breaks_nothing(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample_rewards.hang, str(tmp_path / "pids"))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert await sample_rewards.length_of("ok") == 2.0


def test_rewards_work_in_one_event_loop_after_another() -> None:
    assert asyncio.run(sample_rewards.length_of("one")) == 3.0  # type: ignore[arg-type]
    assert asyncio.run(sample_rewards.length_of("two!")) == 4.0  # type: ignore[arg-type]


def test_function_that_a_worker_cannot_find_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="need the top level of a file"):

        @reward
        def local(text: str) -> float:
            return 1.0

    with pytest.raises(UserError, match="got an async function"):

        @reward
        async def waiting(text: str) -> float:
            return 1.0
