"""A run that is killed, has hardly room, or is seen by nobody still finishes with nothing lost."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.process.json_lines import read_json_lines
from tests.e2e.scene import has
from tests.e2e.terminal import Terminal
from tests.e2e.test_run import DEADLINE_S, REPOSITORY, Run, assert_accounts, collect, continue_trainers, events
from tools.faults_hosts import fill

pytestmark = [pytest.mark.timeout(360), pytest.mark.whole_runs]


@pytest.mark.nightly
def test_a_run_that_is_killed_before_its_first_checkpoint_finishes_and_throws_nothing_away(tmp_path: Path) -> None:
    """One that is killed twice: row 24 of the faults, in the short selection of them too."""
    run = Run(tmp_path, "killed", run__steps=4, trainer__checkpoint_every_steps=100, eval__limit=8)
    given = run.command()[4:]

    ended = subprocess.run(
        [sys.executable, "-m", "tools.kill_again", "--after-steps", "2", "--max-kills", "1", *given],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=340, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "start 2: " in ended.stdout
    assert "steps whole, 0 groups or slots thrown away" in ended.stdout
    assert_accounts(run, num_steps=4, max_staleness=2)


@pytest.mark.nightly
def test_a_stream_that_fills_up_before_the_next_checkpoint_is_due_has_all_ranks_make_one(tmp_path: Path) -> None:
    """One rank: rows 13 and 15 of the faults. The feed's part: ``tests/bus/test_feed.py``."""
    run = Run(
        tmp_path, "small", run__steps=11, trainer__num_ranks=2, trainer__checkpoint_every_steps=100,
        rollout__max_stream_bytes=1 << 20, rollout__max_trajectory_bytes=1 << 15, rollout__batch_groups=8,
        eval__limit=8,
    )  # fmt: skip

    ended = run.finish()

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=11, max_staleness=2)
    steps = [line["step"] for line in events(run, "trainer-0", "checkpoint.written")]
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


@pytest.mark.nightly
def test_a_disk_that_is_full_and_stays_so_ends_the_run_with_one_sentence(small_disk: Path) -> None:
    """One that has room again: row 16 of the faults. The sentence: ``tests/unit/cli/test_run.py``."""
    run = Run(
        small_disk, "full", run__steps=1000, rollout__max_stream_bytes=128 << 20,
        rollout__max_image_stream_bytes=8 << 20, bus__operation_deadline_s=10,
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


def test_a_run_whose_logs_are_taken_away_and_whose_terminal_is_closed_goes_on_and_makes_its_logs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log says since when nobody sees it."""
    run = Run(tmp_path, "unseen", run__steps=6, eval__limit=8)
    run.faults = "trainer.before_step:3:stop"  # else it may be over before they are gone
    for name, value in run.armed.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal((100, 30), program=run.command())
    terminal.wait(has("run unseen", "step", "0/6"), "the panel", within_s=DEADLINE_S)
    terminal.wait(lambda _: run.has_fired("trainer.before_step"), "two steps", within_s=DEADLINE_S)

    shutil.rmtree(run.directory / "logs")
    terminal.close()
    continue_trainers(run)

    assert terminal.process.wait(timeout=DEADLINE_S) == 0
    assert len(run.lines) == 6
    logs = {path.name for path in (run.directory / "logs").glob("*") if path.stat().st_size}
    assert {"trainer-0.jsonl", "node-0.jsonl", "controller.jsonl", "server-0-0.log", "nats.log"} <= logs
    assert events(run, "trainer-0", "checkpoint.written")
    said = [line["event"] for line in read_json_lines(run.directory / "logs" / "launcher.jsonl")]
    assert [line.startswith("stdout: got Input/output error") for line in said if "stdout" in line] == [True], said
