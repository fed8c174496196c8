"""What is said on stdout never ends who says it, wherever stdout leads; that it is lost is told once."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

SAY = """
import sys
from areal_async.process.stdio import LossyStdout, loss, say
for line in ("1", "2", "3"):
    {say}
print("still here", file=sys.stderr)
sys.exit(loss() is None)
"""
STREAMS = """
import os, sys
from areal_async.process.stdio import open_missing_streams, say
open_missing_streams()
say("heard")
pair = os.pipe()
import subprocess
child = subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in (0, 1, 2)]"], close_fds=False)
open(sys.argv[1], "w").write(f"{min(pair) > 2} {sys.stdin.read()!r} {sys.stderr.write('')} {child.returncode}")
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


@pytest.mark.parametrize("say", ["say(line)", "print(line, file=LossyStdout(sys.stdout), flush=True)"])
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


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_lead_nowhere_here_and_in_children(closed: str, tmp_path: Path) -> None:
    found = tmp_path / "found"

    subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", STREAMS, str(found)],
        stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip

    assert found.read_text() == "True '' 0 0"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_verb_opens_the_streams_that_were_closed(closed: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "areal_async", "status", "--run", "none"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip

    assert done.returncode == 2
    if "2>" not in closed:
        assert done.stderr.startswith("--run: got none, need the name of a run in")
