"""What is done to a live run's processes, and what ``status`` says of it meanwhile."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import OK, Status, ask_status
from tests.e2e.test_run import DEADLINE_S, Run, events

LOOK_EVERY_S = 0.2
"""A look takes a processor that those who are to come back want as well."""


def look(run: Run) -> Status:
    """What ``status`` would say, without the seconds of a processor that a new interpreter takes."""
    return anyio.run(ask_status, RunDirectory(run.directory.absolute()))


class Scene:
    """A live run of which one after the other is killed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.told_s: dict[str, float] = {}
        """How long each stood nowhere after it was killed."""

    def kill(
        self, what: str, pids: list[int], is_told: Callable[[Status], bool], is_back: Callable[[Status], bool]
    ) -> None:
        assert pids, f"no process of {what}"
        killed_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while not is_told(status := look(self._run)):
            assert time.monotonic() < killed_s + DEADLINE_S, f"{what} was killed, and status says {status}"
            time.sleep(LOOK_EVERY_S)
        self.told_s[what] = time.monotonic() - killed_s
        while not is_back(status := look(self._run)):
            assert time.monotonic() < killed_s + DEADLINE_S, f"{what} does not come back: {status}"
            time.sleep(LOOK_EVERY_S)


def died(status: Status, role: str) -> bool:
    """Whether a member of this role stands there with the cause of its death: gone, or back already."""
    return any("ended by SIGKILL" in one.why for one in status.members if one.role == role)


def is_back(status: Status, role: str) -> bool:
    members = [one for one in status.members if one.role == role]
    return all(one.presence == OK and one.num_starts == 2 and one.up_s > 0 for one in members)


def has(*pieces: str) -> Callable[[str], bool]:
    return lambda text: all(piece in text for piece in pieces)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def broker_pid(run: Run) -> int:
    return int((run.directory / "bus" / "nats.pid").read_text())


def server_pid(run: Run) -> int:
    return int(events(run, "node-0", "server.started")[-1]["pid"])
