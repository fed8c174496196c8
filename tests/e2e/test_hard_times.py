"""A run that is killed again and again, or has hardly room for its trajectories, still finishes with nothing lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_run import REPOSITORY, Run, assert_accounts

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
