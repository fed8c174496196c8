"""A verb that trains in ranks of its own: this very command again, as one process per rank.

A process that finds ``RANK`` in its environment is a rank, whoever started it (the verb, or torchrun).
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio

from areal_async.config.trainer import EngineSettings
from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import Process, ProcessSpec
from areal_async.launch.gpus import share_gpus
from areal_async.launch.local import LocalBackend
from areal_async.launch.plan import rank_specs
from areal_async.launch.process_group import Death, end_all, run_together
from areal_async.process.host import visible_gpus


def own_rank() -> int | None:
    """Return which rank this process is; None for the one that a person started."""
    rank = os.environ.get("RANK")
    return None if rank is None else int(rank)


def run_ranks(verb: str, words: Sequence[str], trainer: EngineSettings, *, logs: Path) -> int:
    """Start a verb's ranks; the first of them keeps the terminal. Return its exit status.

    Raises:
        PipelineError: a rank failed; where it was a user's mistake, a UserError.
    """
    _, gpus = share_gpus(visible_gpus(), num_inference=0, num_trainer=trainer.num_ranks)
    base = ProcessSpec(
        name=verb,
        command=(sys.executable, "-m", "areal_async", verb, *words),
        environment={"OMP_NUM_THREADS": str(trainer.num_threads), "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        output=None,
    )
    first, *others = rank_specs(base, trainer.num_ranks, directory=logs)
    specs = [replace(first, output=None), *others]
    death = anyio.run(_run, specs, backend_options={"use_uvloop": True})
    if death is None:
        return 0
    if death.name == first.name:
        return death.status if death.status > 0 else 1  # it has said why
    error = UserError if death.status == UserError.exit_code else PipelineError
    raise error(death.sentence or str(death))


async def _run(specs: Sequence[ProcessSpec]) -> Death | None:
    processes: list[Process] = []
    try:
        return await run_together(specs, LocalBackend(), on_start=processes.append)
    finally:
        with anyio.CancelScope(shield=True):
            await end_all(processes, grace_s=0)
