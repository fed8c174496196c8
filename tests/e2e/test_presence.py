"""A live run whose processes are stopped and killed, as ``status`` and ``top`` tell it to its end.

Whoever is killed stands in ``status`` within 3 s with the reason, and its return too; the history keeps both. ``top``
outlives a broker or a controller that does not answer for a while.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import anyio
import pytest

from areal_async.cli.status import OK, Status, ask_status
from areal_async.launch.run_directory import RunDirectory
from tests.e2e.terminal import Terminal
from tests.e2e.test_run import DEADLINE_S, Run, collect, events, role_processes, unhurried

pytestmark = [pytest.mark.timeout(480), pytest.mark.whole_runs]

LOOK_EVERY_S = 0.2
"""A look takes a processor that those who are to come back want as well."""


class Live(NamedTuple):
    """A run and its launcher."""

    run: Run
    launcher: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One run for all of this file; the last test ends it."""
    folder = tmp_path_factory.mktemp("live")
    run = Run(folder, "watched", run__steps=5000)
    with run.start(workflow=unhurried(folder)) as process:
        run.wait_for_step(1, process)
        yield Live(run, process)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            collect(process)


class _Scene:
    def __init__(self, run: Run) -> None:
        self._directory = RunDirectory(run.directory.absolute())
        self.told_s: dict[str, float] = {}

    def look(self) -> Status:
        return anyio.run(ask_status, self._directory)

    def kill(
        self, what: str, pids: list[int], is_told: Callable[[Status], bool], is_back: Callable[[Status], bool]
    ) -> None:
        assert pids, f"no process of {what}"
        killed_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while not is_told(status := self.look()):
            assert time.monotonic() < killed_s + DEADLINE_S, f"{what} was killed, and status says {status}"
            time.sleep(LOOK_EVERY_S)
        self.told_s[what] = time.monotonic() - killed_s
        while not is_back(status := self.look()):
            assert time.monotonic() < killed_s + DEADLINE_S, f"{what} does not come back: {status}"
            time.sleep(LOOK_EVERY_S)


def _died(status: Status, role: str) -> bool:
    """Whether a member of this role stands there with the cause of its death: gone, or back already."""
    return any("ended by SIGKILL" in one.why for one in status.members if one.role == role)


def _is_back(status: Status, role: str) -> bool:
    members = [one for one in status.members if one.role == role]
    return all(one.presence == OK and one.num_starts == 2 and one.up_s > 0 for one in members)


def _has(*pieces: str) -> Callable[[str], bool]:
    return lambda text: all(piece in text for piece in pieces)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_top_says_who_does_not_answer_and_goes_on_when_they_do(live: Live) -> None:
    run = live.run
    screen = Terminal((100, 30), "--run", str(run.directory))
    screen.wait(_has("run watched: running", "in flight"), "the run")

    (controller,) = role_processes(run, "controller")
    with _stopped(controller):
        screen.wait(_has("! controller 0 does not answer", "keeps the books, and does not answer"), "its absence")
    screen.wait(_has("in flight", "no alarm"), "its return")

    with _stopped(_broker(run)):
        screen.wait(_has("run watched: no broker", "what stands here was said before"), "the broker's absence")
    screen.wait(_has("run watched: running", "no alarm"), "the broker's return")
    screen.press("q")
    assert screen.process.wait(timeout=DEADLINE_S) == 0, screen.text


def test_each_role_that_is_killed_is_missed_with_its_cause_and_seen_to_return(live: Live) -> None:
    run = live.run
    scene = _Scene(run)
    server = events(run, "node-0", "server.started")[0]["pid"]
    scene.kill(
        "server",
        [server],
        lambda status: any(one["failure"] == "ended by SIGKILL" for one in status.servers),
        lambda status: not status.servers[0]["is_fenced"],
    )
    for role in ("broker", "controller", "node", "trainer"):
        pids = role_processes(run, role) if role != "broker" else [_broker(run)]
        scene.kill(role, pids, lambda status, r=role: _died(status, r), lambda status, r=role: _is_back(status, r))
    status = scene.look()

    print(f"seconds until it stood in status: {scene.told_s}")  # of at most 3 on a free machine; no test has a clock
    told = [one["event"] for one in status.events if one["event"].startswith("role.")]
    assert "role.lost" in told
    assert told[-1] == "role.returned", told
    lost = [one for one in status.events if one["event"] == "role.lost"][-1]
    assert (lost["crew"], lost["reason"], lost["teller"]) == ("trainer", "trainer-0 ended by SIGKILL", "operator 0")


def test_top_says_when_the_run_has_ended(live: Live) -> None:
    run, launcher = live
    screen = Terminal((100, 30), "--run", str(run.directory))
    screen.wait(_has("run watched: running", "in flight"), "the run")

    launcher.send_signal(signal.SIGINT)
    ended = collect(launcher)

    assert ended.returncode == 0, ended.stdout
    screen.wait(_has("run watched: ended", "status --run watched tells how", "no alarm"), "the end")
    screen.press("q")
    assert screen.process.wait(timeout=DEADLINE_S) == 0, screen.text


def _broker(run: Run) -> int:
    return int((run.directory / "bus" / "nats.pid").read_text())
