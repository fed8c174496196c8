"""Verbs that learn from a data set, in this process or as one process per rank."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from areal_async.cli.checks import check_dataset, check_model, check_tokenizer
from areal_async.cli.ranks import own_rank, run_ranks
from areal_async.config.sources import load_kind
from areal_async.config.tuning import TuningSettings
from areal_async.telemetry import log

S = TypeVar("S", bound=TuningSettings)


def run_tuning(
    arguments: argparse.Namespace, overrides: Sequence[str], kind: type[S], *, learn: Callable[[S], None]
) -> int:
    """Learn to the end; a failure of any rank ends all.

    Args:
        learn: what one rank does. It is called once the settings are known to be right, and imports torch then.
    """
    config = Path(arguments.config) if arguments.config else None
    settings = load_kind(kind, config, overrides)
    check_dataset(settings.dataset, "dataset")
    check_model(settings.model.path)
    check_tokenizer(settings.model.path)
    rank = own_rank()
    if rank is None and settings.trainer.num_ranks > 1:
        words = ["--config", arguments.config] if arguments.config else []
        return run_ranks(
            arguments.verb,
            [*words, *overrides],
            num_ranks=settings.trainer.num_ranks,
            num_threads=settings.trainer.num_threads,
            logs=settings.run_directory / "logs",
        )
    log.configure(f"{arguments.verb}-{rank or 0}", settings.run_directory / "logs")
    learn(settings)
    return 0
