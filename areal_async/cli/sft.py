"""``sft``: fine-tune a model, in this process or as one process per rank.

A process that finds ``RANK`` in its environment is a rank, whoever started it (this verb, or torchrun).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from areal_async import log
from areal_async.cli.checks import check_dataset, check_model
from areal_async.cli.speech import say, settings_help
from areal_async.errors import PipelineError, UserError
from areal_async.host import visible_gpus
from areal_async.launch.backend import Process, ProcessSpec
from areal_async.launch.crew import Death, end_all, run_together
from areal_async.launch.gpus import share_gpus
from areal_async.launch.local import LocalBackend
from areal_async.launch.plan import rank_specs
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
    rank = os.environ.get("RANK")
    if rank is None and settings.trainer.num_ranks > 1:
        return _spawn(settings, arguments, overrides)
    log.configure(f"sft-{rank or 0}", settings.run_directory / "logs")
    from areal_async.trainer.sft import run_sft  # torch, not before the settings are known to be right

    run_sft(settings)
    return 0


def _spawn(settings: SftSettings, arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start the ranks with this very command; the first of them keeps the terminal."""
    num_ranks = settings.trainer.num_ranks
    _, gpus = share_gpus(visible_gpus(), num_inference=0, num_trainer=num_ranks)
    config = ["--config", arguments.config] if arguments.config else []
    base = ProcessSpec(
        name="sft",
        command=(sys.executable, "-m", "areal_async", "sft", *config, *overrides),
        environment={
            "OMP_NUM_THREADS": str(settings.trainer.num_threads),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        },
        output=None,
    )
    first, *others = rank_specs(base, num_ranks, directory=settings.run_directory / "logs")
    specs = [ProcessSpec(name=first.name, command=first.command, environment=first.environment, output=None), *others]
    death = anyio.run(_run_ranks, specs, backend_options={"use_uvloop": True})
    if death is None:
        return 0
    if death.name == first.name:
        return death.status if death.status > 0 else 1  # it has said why
    error = UserError if death.status == UserError.exit_code else PipelineError
    raise error(death.sentence or str(death))


async def _run_ranks(specs: Sequence[ProcessSpec]) -> Death | None:
    processes: list[Process] = []
    try:
        return await run_together(specs, LocalBackend(), on_start=processes.append)
    finally:
        with anyio.CancelScope(shield=True):
            await end_all(processes, grace_s=0)
