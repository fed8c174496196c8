"""Nodes join a live run by command, work, and leave or wait for a run that was killed; all is accounted for."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_async.process.host import free_port
from areal_async.protocol.publish_log import read_receipts
from tests.e2e.test_run import DEADLINE_S, REPOSITORY, Run, collect, role_processes, said_by, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

SECOND, THIRD = "second", "third"
SWAPPED = '"server.swapped"'
SILENT_S = 8
"""The broker's deadline, after three quarters of which a silent run is away."""


def _num_stored_by(node_id: str, run: Run) -> int:
    produced = read_receipts(run.directory)
    return sum(len(one.receipts) for producer, one in produced.items() if producer.startswith(f"{node_id}."))


def _without(folder: Path) -> list[str]:
    """Return the words that have a command see an empty folder there; none where this kernel gives no such view."""
    words = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        return []
    return [*words, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]


def _join(node_id: str, run: Run, tmp_path: Path, *, view: Sequence[str] = ()) -> "subprocess.Popen[str]":
    url = (run.directory / "bus" / "url").read_text().strip()
    words = ["node", "--join", url, "--run", "run", "--directory", str(tmp_path), "--node-id", node_id]
    return subprocess.Popen(
        [*view, sys.executable, "-m", "areal_async", *words],
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_node_joins_and_leaves_another_waits_for_a_killed_run_and_the_doctor_finds_all_they_did(
    tmp_path: Path,
) -> None:
    run = Run(
        tmp_path, "run", run__steps=5000, eval__dataset="null", bus__port=free_port(setting="bus"),
        bus__operation_deadline_s=SILENT_S, inference__weight_transfer="distributed",
    )  # fmt: skip
    with run.start() as process:
        run.wait_for_step(1, process)
        _have_a_node_join_and_leave(run, process, tmp_path)
        with _join(THIRD, run, tmp_path) as node:
            wait_until(lambda: _num_stored_by(THIRD, run) > 0 or node.poll() is not None, "work of the third node")
            process.kill()
            process.communicate(timeout=DEADLINE_S)
            _have_the_run_come_back(run, node)

    doctor = said_by("doctor", run.directory)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert re.search(r"acknowledged to [45] producers", " ".join(doctor.stdout.split())), doctor.stdout


def _have_a_node_join_and_leave(run: Run, process: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Nobody waits for its server then. It sees no file of weights, as a host that shares none with the trainer."""
    view = _without(run.directory / "weights")
    with _join(SECOND, run, tmp_path, view=view) as node:
        wait_until(lambda: _num_stored_by(SECOND, run) > 2 or node.poll() is not None, "work of the second node")
        node.send_signal(signal.SIGTERM)
        left = collect(node)
    run.wait_for_step(len(run.lines) + 2, process)

    assert left.returncode == 0, left.stdout
    assert f"node {SECOND} joins run run" in left.stdout
    logs = run.directory / "nodes" / SECOND / "logs"
    swaps = [
        json.loads(line) for log in logs.glob("*.jsonl") for line in log.read_text().splitlines() if SWAPPED in line
    ]
    assert {one["kind"] for one in swaps} == {"distributed"} or not view, swaps


def _have_the_run_come_back(run: Run, node: "subprocess.Popen[str]") -> None:
    """Its launcher is killed: the node waits, works again, and ends as the run does."""
    node_log = run.directory / "nodes" / THIRD / "logs" / "keeper.jsonl"
    wait_until(lambda: "run.away" in node_log.read_text() or node.poll() is not None, "the node alone")
    num_stored = _num_stored_by(THIRD, run)
    with run.start() as again:
        wait_until(
            lambda: _num_stored_by(THIRD, run) > num_stored or None not in (node.poll(), again.poll()),
            "work for the run that is back",
        )
        again.send_signal(signal.SIGINT)
        ended = collect(again)
    left = collect(node)

    assert ended.returncode == 0, ended.stdout
    assert not role_processes(run, "node")
    assert "its launcher has not been heard for 6 s" in left.stdout
    assert left.stdout.count(f"node {THIRD} joins run run") >= 2
    assert left.returncode == 0, left.stdout
