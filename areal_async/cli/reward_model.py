"""``reward-model``: train a model that says which of two answers is better."""

import argparse
from collections.abc import Sequence

from areal_async.cli.tuning import run_tuning
from areal_async.config.reward_model import RewardModelSettings


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train to the end; a failure of any rank ends all."""
    return run_tuning(arguments, overrides, RewardModelSettings, learn=_learn)


def _learn(settings: RewardModelSettings) -> None:
    from areal_async.trainer.tuning.reward_model import run_reward_model  # torch

    run_reward_model(settings)
