"""A process that is asked where it stands says so, also with its loop held up, and is never ended by the question."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_async.process import stacks

PROGRAM = """
import ctypes, sys, time
from pathlib import Path
import anyio
from areal_async.process import stacks

async def held_up_in_python():
    print("ready", flush=True)
    if sys.argv[2] == "blocked":
        time.sleep(60)
    if sys.argv[2] == "in a library":
        ctypes.CDLL(None).sleep(60)
    await waiting_for_nothing()

async def waiting_for_nothing():
    await anyio.sleep(60)

stacks.install(Path(sys.argv[1]))
anyio.run(held_up_in_python, backend_options={"use_uvloop": True})
"""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("blocked", "in held_up_in_python"),
        ("in a library", "in held_up_in_python"),
        ("awaiting", "waiting_for_nothing"),
    ],
)
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


def test_a_process_is_asked_by_a_command_as_well(tmp_path: Path) -> None:
    """So another host's is, by a step of its own there."""
    path = tmp_path / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), "awaiting"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            subprocess.run(stacks.ask_command(process.pid), check=True)
            ends_at = time.monotonic() + 20.0
            while "Thread" not in path.read_text() and time.monotonic() < ends_at:
                time.sleep(0.05)

            assert "Thread" in path.read_text()
        finally:
            process.kill()


def test_a_file_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), "awaiting"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        shutil.rmtree(path.parent)
        ends_at = time.monotonic() + 20.0
        while not (path.exists() and "waiting_for_nothing" in path.read_text()) and time.monotonic() < ends_at:
            assert stacks.ask(process.pid)
            time.sleep(0.05)
        try:
            assert "waiting_for_nothing" in path.read_text()
        finally:
            process.kill()


BUSY = """
import sys
from pathlib import Path
from areal_async.process import stacks

def deep(n):
    return deep(n - 1) if n else 0

stacks.install(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    deep(60)
"""
NUM_ASKED = 20_000
"""A handler that reads frames while they change has ended this process after 2,000 to 40,000."""


def test_a_process_that_is_asked_while_it_works_lives_on(tmp_path: Path) -> None:
    """Frames of a thread that runs meanwhile may be gone before they are read."""
    path = tmp_path / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            num_asked = sum(stacks.ask(process.pid) for _ in range(NUM_ASKED))
            assert process.poll() is None
        finally:
            process.kill()
    told = path.read_text()
    assert num_asked == NUM_ASKED
    assert "in deep" in told
    assert ", 0 tasks" in told


def test_a_process_that_cannot_write_where_it_stands_lives_on() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY, "/dev/full"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            for _ in range(100):
                assert stacks.ask(process.pid)
                time.sleep(0.002)
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
