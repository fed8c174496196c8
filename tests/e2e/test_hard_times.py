"""A run that is killed again and again, or has hardly room for its trajectories, still finishes with nothing lost."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, collect
from tools.faults_hosts import fill

pytestmark = pytest.mark.timeout(360)


def test_a_run_that_is_killed_whenever_it_has_made_two_steps_finishes_and_throws_nothing_away(tmp_path: Path) -> None:
    run = Run(tmp_path, "killed", run__steps=6, trainer__checkpoint_every_steps=100, eval__limit=8)
    given = run.command()[4:]

    ended = subprocess.run(
        [sys.executable, "-m", "tools.kill_again", "--after-steps", "2", "--max-kills", "2", *given],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=340, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "start 3: " in ended.stdout
    assert "steps whole, 0 groups or slots thrown away" in ended.stdout
    assert_accounts(run, num_steps=6, max_staleness=2)


def test_a_stream_that_fills_up_before_the_next_checkpoint_is_due_has_all_ranks_make_one(tmp_path: Path) -> None:
    run = Run(
        tmp_path, "small", run__steps=11, trainer__num_ranks=2, trainer__checkpoint_every_steps=100,
        rollout__max_stream_bytes=1 << 20, rollout__max_trajectory_bytes=1 << 15, rollout__batch_groups=8,
        eval__limit=8,
    )  # fmt: skip

    ended = run.finish()

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=11, max_staleness=2)
    logged = [json.loads(line) for line in (run.directory / "logs" / "trainer-0.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if line["event"] == "checkpoint.written"]
    assert len(steps) == 2
    assert steps[-1] == 11


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "none", disk]).returncode:
        pytest.skip("no tmpfs of its own: it needs root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_is_full_and_stays_so_ends_the_run_with_one_sentence(small_disk: Path) -> None:
    run = Run(
        small_disk, "full", run__steps=1000, rollout__max_stream_bytes=128 << 20, bus__operation_deadline_s=10,
    )  # fmt: skip
    process = run.start("--no-display")
    run.wait_for_step(2, process)

    fill(small_disk / "ballast")
    ended = collect(process)

    *before, last = ended.stdout.strip().splitlines()
    assert ended.returncode == 1
    assert last.startswith(f"run full: no space left on the disk of {run.directory}: got 0 MB free, need 67; make room")
    assert "Logging error" not in ended.stdout
    assert "Traceback" not in ended.stdout
    (small_disk / "ballast").unlink()
    assert "Logging error" not in "".join(path.read_text() for path in (run.directory / "logs").glob("*.out"))


def test_a_run_whose_logs_are_taken_away_goes_on_and_makes_them_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "tidy", run__steps=6, eval__limit=8)
    process = run.start("--no-display")
    run.wait_for_step(2, process)

    shutil.rmtree(run.directory / "logs")
    ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    logs = {path.name for path in (run.directory / "logs").glob("*") if path.stat().st_size}
    assert {"trainer-0.jsonl", "node-0.jsonl", "controller.jsonl", "server-0-0.log", "nats.log"} <= logs
    logged = [json.loads(line) for line in (run.directory / "logs" / "trainer-0.jsonl").read_text().splitlines()]
    assert "checkpoint.written" in [line["event"] for line in logged]
