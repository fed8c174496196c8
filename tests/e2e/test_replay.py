"""A run whose trainer is killed loses nothing; what it has archived trains again to the same losses, or others."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, collect, said_by

pytestmark = [pytest.mark.timeout(360), pytest.mark.whole_runs]


def test_a_trainer_that_is_killed_is_replaced_and_the_archive_replays_to_its_own_losses_and_others_when_told_to(
    tmp_path: Path,
) -> None:
    """All roles: ``test_operating.py``."""
    # With a reference: it is loaded again by the second trainer, and by each replay.
    run = Run(tmp_path, "recorded", run__steps=8, trainer__checkpoint_every_steps=2, algorithm__kl_coef=0.05)
    run.faults = "trainer.after_step:3:kill"
    with run.start() as process:
        run.wait_for_step(4, process)
        listed = said_by("trajectories", run.directory, "--json", "--limit", "0")
        ended = collect(process)
    assert ended.returncode == 0, ended.stdout
    assert "trainer-0 ended by SIGKILL" in ended.stdout
    assert_accounts(run, num_steps=8, max_staleness=2)
    assert run.lines[-1]["weights_version"] == "2-8", "the trainer was to be killed before the end"
    assert all(math.isfinite(line["kl_mean"]) for line in run.lines)
    assert run.lines[-1]["kl_mean"] > 0, "answers differ from the reference's"
    trained = {f"{row['group_id']}.{row['sibling']}": row["reward"] for row in run.trained}
    live = [json.loads(line) for line in listed.stdout.splitlines()]
    assert sum(one["state"] == "trained" for one in live) > 0, listed.stderr
    assert all(trained[one["id"]] == one["reward"] for one in live if one["state"] == "trained")
    assert len({one["id"] for one in live}) == len(live)

    same = said_by("replay", run.directory)

    assert same.returncode == 0, same.stdout + same.stderr
    assert "losses reproduced: largest difference" in same.stdout
    replayed = [json.loads(line) for line in (tmp_path / "recorded-replay" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(replayed, run.lines, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["reward_mean"] == theirs["reward_mean"]
        assert mine["kl_mean"] == pytest.approx(theirs["kl_mean"], rel=1e-5, abs=1e-9)
    assert (tmp_path / "recorded-replay" / "model" / "model.safetensors").exists()

    words = (
        "replay", "--run", str(run.directory), "--steps", "2", "--run.name", "other", "--trainer.num_ranks", "2",
        "--algorithm.name", "rloo", "--trainer.lr", "1e-3", "--trainer.warmup_steps", "0",
    )  # fmt: skip
    # Ranks write to the terminal themselves, and not to what this process takes for it.
    other = subprocess.run(
        [sys.executable, "-m", "areal_async", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=180
    )

    assert other.returncode == 0, other.stdout + other.stderr
    assert "changed: algorithm.name, algorithm.advantage_baseline, algorithm.advantage_std, " in other.stdout
    lines = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == [1e-3] * 2
    assert lines[0]["reward_mean"] == run.lines[0]["reward_mean"]
    assert lines[1]["loss"] != pytest.approx(run.lines[1]["loss"], rel=1e-3)
