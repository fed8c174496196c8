"""What a preset needs besides the policy is loaded, trained and told of, in a whole run."""

import math
from pathlib import Path

import pytest

from tests.e2e.test_run import Run, assert_accounts

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

METRICS = ("value_loss", "explained_variance", "kl_mean")


def test_a_critic_and_a_reference_take_part_in_a_run(tmp_path: Path) -> None:
    """A reference whose divergence is in the loss, and no critic: the run of ``test_replay.py``."""
    settings = {"algorithm__name": "ppo", "algorithm__kl_coef": 0.05, "algorithm__kl_in": "reward"}
    run = Run(tmp_path, "models", run__steps=3, **settings)

    ended = run.finish()

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=3, max_staleness=2)
    assert all(math.isfinite(line[name]) for line in run.lines for name in METRICS), run.lines
    assert run.lines[-1]["kl_mean"] > 0
