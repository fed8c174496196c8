"""A blocked loop is reported, with the line that blocks it, while it is blocked."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from areal_async.rollout.user_code.loop_block_report import (
    ENDED_BY_WATCH,
    ENDED_FOR_CULPRIT,
    LoopBlock,
    LoopBlockFile,
    Work,
)
from areal_async.rollout.user_code.loop_watchdog import Look, LoopWatchdog
from tests.brokers import until

REPOSITORY = Path(__file__).parents[4]

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


def hold_up_the_loop(logs: list[Any]) -> None:
    """Hold it up until that is reported, and for a while after."""
    ends_at = time.monotonic() + 60.0
    while not reports_in(logs) and time.monotonic() < ends_at:
        time.sleep(0.01)
    time.sleep(0.2)


def reports_in(logs: list[Any]) -> list[Any]:
    return [log for log in logs if log["place"].endswith(" hold_up_the_loop")]


async def test_blocking_call_is_named_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.rollout.user_code.loop_watchdog.BLOCKED_S", 0.1)
    monkeypatch.setattr("areal_async.rollout.user_code.loop_watchdog.BEAT_S", 0.001)
    watch = LoopWatchdog()
    with structlog.testing.capture_logs() as logs, watch.watching():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run_beats)
            await anyio.wait_all_tasks_blocked()
            hold_up_the_loop(logs)
            await until(lambda: watch.lag.max_s > 0.2)
            tasks.cancel_scope.cancel()

    (report,) = reports_in(logs)
    assert report["event"] == "loop.blocked"
    assert any("hold_up_the_loop" in frame for frame in report["frames"])


def test_a_loop_that_stands_still_past_the_deadline_is_ended_with_its_process() -> None:
    program = (
        "import time, anyio\n"
        "from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog\n"
        "async def main():\n"
        "    watch = LoopWatchdog(deadline_s=0.2)\n"
        "    with watch.watching():\n"
        "        time.sleep(60)\n"
        "anyio.run(main)\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100, check=False)

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


DEADLINE_S = 1.5
PROGRAM = """
import asyncio, json, re, sys, time
from pathlib import Path
import anyio
from areal_async.rollout.user_code import loop_watchdog
from areal_async.rollout.user_code.loop_block_report import LoopBlockFile, Work
from areal_async.rollout.user_code.task_scope import TaskScope
from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog

loop_watchdog.BLOCKED_S, loop_watchdog.TOLD_S = 0.5, 1.0
FILE = LoopBlockFile(Path(sys.argv[1]), "0")


def hold_up():
    print(time.time(), flush=True)
    BLOCK_HERE


async def hold_up_later():
    await asyncio.sleep(0)
    hold_up()


async def workflow():
    hold_up()


async def workflow_with_a_task():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold_up_later)


async def workflow_with_a_callback():
    asyncio.get_running_loop().call_soon(hold_up)
    await asyncio.sleep(60)


async def main():
    watch = LoopWatchdog(deadline_s=float(sys.argv[3]), file=FILE)
    async with anyio.create_task_group() as tasks:
        with watch.watching():
            tasks.start_soon(watch.run_beats)
            await anyio.sleep(0.05)
            scope = TaskScope("workflow w", Work(workflow="w", name="slot 0-1-0.2"))
            await scope.run(globals()[sys.argv[2]](), deadline_s=100)
            while FILE.read() is not None:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

anyio.run(main, backend_options={"use_uvloop": True})
"""


def run_blocked(
    tmp_path: Path, block: str, *, workflow: str = "workflow", deadline_s: float = DEADLINE_S
) -> tuple["subprocess.CompletedProcess[str]", LoopBlock | None, Path]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("BLOCK_HERE", block))
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path), workflow, str(deadline_s)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return ended, LoopBlockFile(tmp_path, "0").read(), program


@pytest.mark.parametrize("block", ["while True: pass", "time.sleep(60)", 're.match("(a|a)*b", "a" * 60)'])
def test_what_holds_up_the_loop_is_named_with_its_slot_and_line_and_its_process_ended(
    tmp_path: Path, block: str
) -> None:
    ended, found, program = run_blocked(tmp_path, block)

    assert ended.returncode == ENDED_FOR_CULPRIT, ended.stderr
    assert found is not None
    assert found.work == Work(workflow="w", name="slot 0-1-0.2")
    assert found.place == f"{program}:16 hold_up"
    assert found.blocked_s >= DEADLINE_S
    assert "loop.blocked" in ended.stdout


def test_a_task_that_the_workflow_has_started_is_known_for_its_own(tmp_path: Path) -> None:
    ended, found, _ = run_blocked(tmp_path, "time.sleep(60)", workflow="workflow_with_a_task")

    assert ended.returncode == ENDED_FOR_CULPRIT, ended.stderr
    assert found is not None
    assert found.work == Work(workflow="w", name="slot 0-1-0.2")


def test_where_nobody_knows_whose_it_is_the_line_is_named_and_the_status_is_another(tmp_path: Path) -> None:
    ended, found, program = run_blocked(tmp_path, "time.sleep(60)", workflow="workflow_with_a_callback")

    assert ended.returncode == ENDED_BY_WATCH, ended.stderr
    assert found is not None
    assert (found.work, found.place) == (None, f"{program}:16 hold_up")


def test_a_loop_that_moves_again_leaves_nothing_to_recover(tmp_path: Path) -> None:
    ended, found, _ = run_blocked(tmp_path, "while FILE.read() is None: time.sleep(0.01)", deadline_s=100.0)

    assert ended.returncode == 0, ended.stderr
    assert "loop.blocked" in ended.stdout
    assert found is None
