"""A process that is asked where it stands says so, also with its loop held up, and is never ended by the question."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_async import stacks

PROGRAM = """
import sys, time
from pathlib import Path
import anyio
from areal_async import stacks

async def held_up_in_python():
    print("ready", flush=True)
    if sys.argv[2] == "blocked":
        time.sleep(60)
    await waiting_for_nothing()

async def waiting_for_nothing():
    await anyio.sleep(60)

stacks.install(Path(sys.argv[1]))
anyio.run(held_up_in_python, backend_options={"use_uvloop": True})
"""


@pytest.mark.parametrize(("kind", "told"), [("blocked", "in held_up_in_python"), ("awaiting", "waiting_for_nothing")])
def test_a_process_that_is_asked_writes_where_it_stands(tmp_path: Path, kind: str, told: str) -> None:
    path = tmp_path / "logs" / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), kind], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ends_at = time.monotonic() + 20.0
        while told not in path.read_text() and time.monotonic() < ends_at:
            assert stacks.ask(process.pid)
            time.sleep(0.05)
        try:
            assert told in path.read_text()
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_has_not_come_so_far_is_not_asked() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert not stacks.ask(process.pid)
            assert process.poll() is None
        finally:
            process.kill()
    assert not stacks.ask(process.pid)


def test_tasks_at_the_same_place_are_told_together() -> None:
    async def wait_here() -> None:
        await asyncio.sleep(60)

    async def gather() -> str:
        tasks = {asyncio.ensure_future(wait_here()) for _ in range(3)}
        await asyncio.sleep(0)
        text = stacks.task_stacks(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return text

    text = asyncio.run(gather())

    assert text.startswith("3 tasks at:\n")
    assert "wait_here" in text
    assert os.path.basename(__file__) in text
