"""``sft`` and ``reward-model``: learn from a data set, in this process or as one process per rank."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from areal_async.cli.ranks import own_rank, run_ranks
from areal_async.cli.starting.checks import check_dataset, check_model, check_tokenizer
from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.sft import SftSettings
from areal_async.config.sources import load_kind
from areal_async.config.tuning import TuningSettings
from areal_async.telemetry import log

KINDS: dict[str, tuple[type[TuningSettings], str]] = {
    "sft": (SftSettings, "sft.run_sft"),
    "reward-model": (RewardModelSettings, "reward_model.run_reward_model"),
}
"""Verb -> its settings, and what a rank does, in ``trainer.tuning``."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Learn to the end; a failure of any rank ends all."""
    kind, learner = KINDS[arguments.verb]
    config = Path(arguments.config) if arguments.config else None
    settings = load_kind(kind, config, overrides)
    check_dataset(settings.dataset, "dataset")
    check_model(settings.model.path)
    check_tokenizer(settings.model.path)
    rank, logs = own_rank(), settings.run_directory / "logs"
    if rank is None and settings.trainer.num_ranks > 1:
        words = ["--config", arguments.config] if arguments.config else []
        return run_ranks(arguments.verb, [*words, *overrides], settings.trainer, settings.launch, logs=logs)
    log.configure(f"{arguments.verb}-{rank or 0}", logs)
    module, _, function = learner.partition(".")  # imported once the settings are known to be right: it loads torch
    getattr(importlib.import_module(f"areal_async.trainer.tuning.{module}"), function)(settings)
    return 0
