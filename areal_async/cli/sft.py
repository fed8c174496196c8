"""``sft``: fine-tune a model on prompts and their answers."""

import argparse
from collections.abc import Sequence

from areal_async.cli.tuning import run_tuning
from areal_async.config.sft import SftSettings


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Fine-tune to the end; a failure of any rank ends all."""
    return run_tuning(arguments, overrides, SftSettings, learn=_learn)


def _learn(settings: SftSettings) -> None:
    from areal_async.trainer.tuning.sft import run_sft  # torch

    run_sft(settings)
