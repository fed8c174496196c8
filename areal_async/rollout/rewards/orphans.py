"""What a reward starts ends with its call, though it has left its session or lost its parent: daemons too. Linux alone.

    keeper ── worker ── whatever a reward starts

The keeper is the worker's parent and its subreaper: who loses a parent below it becomes its child, and nobody gets out
from under it. When the worker ends, however it does, or the keeper is asked to, everything below is killed before the
keeper ends as the worker did. A helper that stays a child of the worker, in its session, lives from call to call.

Source: ``PR_SET_CHILD_SUBREAPER`` in prctl(2).
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from areal_async.process.parent_death import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)
END_S = 2.0
"""Time that what is killed has to be gone."""
LOOK_S = 0.002


def fork_below_keeper(parent_pid: int) -> None:
    """Go on in a child; this process becomes its keeper, and ends with ``parent_pid`` at the latest."""
    if sys.platform != "linux":
        return die_with_parent(parent_pid)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        _keep(worker, parent_pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    return die_with_parent(keeper)


def helpers() -> set[int]:
    """Return what runs below this worker's keeper now, beside the worker."""
    return {pid for pid, _, _ in _below(os.getppid(), ())} - {os.getpid()} if sys.platform == "linux" else set()


def end_leftovers(spared: Container[int]) -> None:
    """Kill what has left the worker's session or lost its parent, but for ``spared`` and what is below them."""
    if sys.platform != "linux":
        return
    keeper, worker, session = os.getppid(), os.getpid(), os.getsid(0)
    ends_at = time.monotonic() + END_S
    while time.monotonic() < ends_at:
        left = [
            pid
            for pid, parent, its_session in _below(keeper, spared)
            if pid != worker and (its_session != session or parent == keeper)
        ]
        if not left:
            return
        _kill(left)
        time.sleep(LOOK_S)


def _keep(worker: int, parent_pid: int) -> NoReturn:
    """Wait for the worker's end, kill all it left, and end as it did."""
    os.closerange(0, 2)  # else nobody would see that the worker has closed them
    code = _await_end(worker, parent_pid)
    with suppress(ChildProcessError):
        while True:
            _kill(pid for pid, _, _ in _below(os.getpid(), ()))
            os.wait()
    if code < 0:
        with suppress(OSError):  # nobody catches SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _await_end(worker: int, parent_pid: int) -> int:
    """Return the worker's status once it has ended; 1 when the keeper is to end first."""
    with suppress(SystemExit):  # the parent has gone already
        die_with_parent(parent_pid, by=signal.SIGTERM)
        while signal.sigwait(_AWAITED) != signal.SIGTERM:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return os.waitstatus_to_exitcode(ended[1])
    return 1


def _kill(pids: Iterator[int] | list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int, spared: Container[int]) -> Iterator[tuple[int, int, int]]:
    """Yield process, parent and session of all that runs below a process."""
    for child in _children(pid):
        if child not in spared:
            with suppress(OSError):  # it has just ended
                state, _, _, session = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    yield child, pid, int(session)
            yield from _below(child, spared)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found
