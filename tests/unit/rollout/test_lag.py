"""A blocked loop is reported, with the line that blocks it, while it is blocked."""

import subprocess
import sys
import time

import anyio
import pytest
import structlog

from areal_async.rollout.lag import ENDED_BY_WATCH, Look, LoopWatch

pytestmark = pytest.mark.anyio


def hold_up_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_blocking_call_is_named_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.rollout.lag.BLOCKED_S", 0.1)
    monkeypatch.setattr("areal_async.rollout.lag.BEAT_S", 0.001)
    watch = LoopWatch()
    with structlog.testing.capture_logs() as logs, watch.watching():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run_beats)
            await anyio.wait_all_tasks_blocked()
            hold_up_the_loop(0.5)
            num_reports = len(logs)
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    assert num_reports == 1
    assert logs[0]["event"] == "loop.blocked"
    assert any("hold_up_the_loop" in frame for frame in logs[0]["frames"])
    assert watch.lag.max_s > 0.3


def test_a_loop_that_stands_still_past_the_deadline_is_ended_with_its_process() -> None:
    program = (
        "import time, anyio\n"
        "from areal_async.rollout.lag import ENDED_BY_WATCH, LoopWatch\n"
        "async def main():\n"
        "    watch = LoopWatch(deadline_s=0.2)\n"
        "    with watch.watching():\n"
        "        time.sleep(60)\n"
        "anyio.run(main)\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)

    assert ended.returncode == ENDED_BY_WATCH


@pytest.mark.parametrize(
    ("late_s", "worked_s", "is_stopped"),
    [
        pytest.param(40.0, 0.01, True, id="stopped and continued"),
        pytest.param(40.0, 39.0, False, id="computing in a library that lets no thread run"),
        pytest.param(0.1, 0.0, False, id="idle"),
    ],
)
def test_time_for_which_the_process_was_stopped_is_told_from_work(
    late_s: float, worked_s: float, is_stopped: bool
) -> None:
    before = Look(at_s=100.0, worked_s=5.0)

    assert Look(at_s=100.25 + late_s, worked_s=5.0 + worked_s).found_stopped_since(before) is is_stopped
