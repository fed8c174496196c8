"""What a preset needs besides the policy is loaded, trained and told of, in a whole run."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_run import Run, assert_accounts

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


@pytest.mark.parametrize(
    ("algorithm", "metrics"),
    [
        ({"name": "ppo", "kl_coef": 0.05, "kl_in": "reward"}, ("value_loss", "explained_variance", "kl_mean")),
        ({"name": "grpo", "kl_coef": 0.05}, ("kl_mean",)),
    ],
    ids=["ppo with its critic and a reference", "grpo with a reference"],
)
def test_models_beside_the_policy_take_part_in_a_run(
    tmp_path: Path, algorithm: dict[str, Any], metrics: tuple[str, ...]
) -> None:
    settings = {f"algorithm__{name}": value for name, value in algorithm.items()}
    run = Run(tmp_path, "models", run__steps=3, **settings)

    ended = run.finish()

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=3, max_staleness=2)
    assert all(math.isfinite(line[name]) for line in run.lines for name in metrics), run.lines
    assert run.lines[-1]["kl_mean"] > 0
