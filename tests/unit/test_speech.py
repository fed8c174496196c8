"""What is said on stdout never ends who says it, wherever stdout leads; that it is lost is told once."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

SAY = """
import sys
from areal_async.speech import Voice, loss, say
for line in ("1", "2", "3"):
    {say}
print("still here", file=sys.stderr)
sys.exit(loss() is None)
"""


@contextmanager
def _full_disk() -> Iterator[int]:
    full = os.open("/dev/full", os.O_WRONLY)
    yield full
    os.close(full)


@contextmanager
def _closed_terminal() -> Iterator[int]:
    terminal, own = pty.openpty()
    os.close(terminal)
    yield own
    os.close(own)


@contextmanager
def _gone_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("say", ["say(line)", "print(line, file=Voice(sys.stdout), flush=True)"])
@pytest.mark.parametrize(
    ("opened", "told"),
    [
        (_full_disk, ["stdout: got No space left on device, need what can be written; "]),
        (_closed_terminal, ["stdout: got Input/output error, need what can be written; "]),
        (_gone_reader, []),
    ],
)
def test_who_says_something_goes_on_though_it_cannot_be_written_and_tells_so_once(
    say: str, opened: Callable[[], AbstractContextManager[int]], told: list[str]
) -> None:
    with opened() as stdout:
        done = subprocess.run(
            [sys.executable, "-c", SAY.format(say=say)], stdout=stdout, stderr=subprocess.PIPE, text=True
        )

    lines = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.startswith(start) for line, start in zip(lines, told, strict=False)] == [True] * len(told)
    assert lines[len(told) :] == ["still here"]
