"""A second node joins a live run by command, works, and leaves; what it has stored is trained and accounted for."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.host import free_port
from areal_async.receipts import read_receipts
from tests.e2e.test_run import REPOSITORY, Run, collect, role_processes, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

NODE_ID = "second"


def _num_stored_by_second(run: Run) -> int:
    produced = read_receipts(run.directory)
    return sum(len(one.receipts) for producer, one in produced.items() if producer.startswith(f"{NODE_ID}."))


def _join(run: Run, tmp_path: Path) -> "subprocess.Popen[str]":
    url = (run.directory / "bus" / "url").read_text().strip()
    words = ["node", "--join", url, "--run", "run", "--directory", str(tmp_path), "--node-id", NODE_ID]
    return subprocess.Popen(
        [sys.executable, "-m", "areal_async", *words],
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_node_joins_a_live_run_and_leaves_it_and_the_doctor_finds_all_it_did(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", run__steps=5000, eval__dataset="null")
    with run.start() as process:
        run.wait_for_step(1, process)
        with _join(run, tmp_path) as node:
            wait_until(lambda: _num_stored_by_second(run) > 2 or node.poll() is not None, "work of the second node")
            node.send_signal(signal.SIGTERM)
            left = collect(node)
        step = len(run.lines)
        run.wait_for_step(step + 2, process)  # nobody waits for its server
        process.send_signal(signal.SIGINT)
        ended = collect(process)

    assert left.returncode == 0, left.stdout
    assert f"node {NODE_ID} joins run run" in left.stdout
    assert ended.returncode == 0, ended.stdout
    assert not role_processes(run, "node")
    assert (run.directory / "nodes" / NODE_ID / "logs").is_dir()
    doctor = subprocess.run(
        [sys.executable, "-m", "areal_async", "doctor", "--run", str(run.directory)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "acknowledged to 2 producers" in " ".join(doctor.stdout.split())


@pytest.mark.timeout(480)
def test_a_joined_node_waits_for_a_killed_run_and_works_for_it_again(tmp_path: Path) -> None:
    port, deadline_s = free_port(setting="bus"), 8  # of the broker, after which a silent run is away
    run = Run(
        tmp_path, "run", run__steps=5000, eval__dataset="null", bus__port=port, bus__operation_deadline_s=deadline_s
    )
    with run.start() as process:
        run.wait_for_step(1, process)
        with _join(run, tmp_path) as node:
            wait_until(lambda: _num_stored_by_second(run) > 0 or node.poll() is not None, "work of the second node")
            process.kill()
            process.communicate(timeout=30)
            node_log = run.directory / "nodes" / NODE_ID / "logs" / "keeper.jsonl"
            wait_until(lambda: "run.away" in node_log.read_text() or node.poll() is not None, "the node alone")
            num_stored = _num_stored_by_second(run)
            with run.start() as again:
                wait_until(
                    lambda: _num_stored_by_second(run) > num_stored or None not in (node.poll(), again.poll()),
                    "work for the run that is back",
                )
                again.send_signal(signal.SIGINT)
                ended = collect(again)
            left = collect(node)

    assert ended.returncode == 0, ended.stdout
    assert "its launcher has not been heard for 6 s" in left.stdout
    assert left.stdout.count(f"node {NODE_ID} joins run run") == 2
    assert left.returncode == 0, left.stdout
