"""``sft``: fine-tune a model, in this process or as one process per rank."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal_async import log
from areal_async.cli.checks import check_dataset, check_model
from areal_async.cli.ranks import own_rank, run_ranks
from areal_async.cli.speech import say, settings_help
from areal_async.settings_sources import load_settings
from areal_async.sft_settings import SftSettings


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Fine-tune to the end; a failure of any rank ends all."""
    if arguments.help_settings:
        say(settings_help(SftSettings))
        return 0
    config = Path(arguments.config) if arguments.config else None
    settings = load_settings(config, overrides, SftSettings)
    check_dataset(settings.dataset, "dataset")
    check_model(settings.model.path)
    rank = own_rank()
    if rank is None and settings.trainer.num_ranks > 1:
        config_words = ["--config", arguments.config] if arguments.config else []
        return run_ranks(
            "sft",
            [*config_words, *overrides],
            num_ranks=settings.trainer.num_ranks,
            num_threads=settings.trainer.num_threads,
            logs=settings.run_directory / "logs",
        )
    log.configure(f"sft-{rank or 0}", settings.run_directory / "logs")
    from areal_async.trainer.sft import run_sft  # torch, not before the settings are known to be right

    run_sft(settings)
    return 0
