"""Whoever is killed stands in ``status`` within 3 s with the reason, and its return too; the history keeps both."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from areal_async.cli.status import OK, Status, ask_status
from areal_async.launch.run_directory import RunDirectory
from tests.e2e.test_run import Run, collect, events, role_processes

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

BACK_WITHIN_S = 60.0


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
            assert time.monotonic() < killed_s + BACK_WITHIN_S, f"{what} was killed, and status says {status}"
        self.told_s[what] = time.monotonic() - killed_s
        while not is_back(status := self.look()):
            assert time.monotonic() < killed_s + BACK_WITHIN_S, f"{what} does not come back: {status}"


def _died(status: Status, role: str) -> bool:
    """Whether a member of this role stands there with the cause of its death: gone, or back already."""
    return any("ended by SIGKILL" in one.why for one in status.members if one.role == role)


def _is_back(status: Status, role: str) -> bool:
    members = [one for one in status.members if one.role == role]
    return all(one.presence == OK and one.num_starts == 2 and one.up_s > 0 for one in members)


def test_each_role_that_is_killed_is_missed_with_its_cause_and_seen_to_return(tmp_path: Path) -> None:
    run = Run(tmp_path, "missed", run__steps=5000)
    scene = _Scene(run)
    with run.start() as process:
        run.wait_for_step(1, process)
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
        process.send_signal(signal.SIGINT)
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    print(f"seconds until it stood in status: {scene.told_s}")  # of at most 3 on a free machine; no test has a clock
    told = [one["event"] for one in status.events if one["event"].startswith("role.")]
    assert "role.lost" in told
    assert told[-1] == "role.returned", told
    lost = [one for one in status.events if one["event"] == "role.lost"][-1]
    assert (lost["crew"], lost["reason"], lost["teller"]) == ("trainer", "trainer-0 ended by SIGKILL", "operator 0")


def _broker(run: Run) -> int:
    return int((run.directory / "bus" / "nats.pid").read_text())
