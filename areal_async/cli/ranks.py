"""A verb that trains in ranks of its own: this very command again, as one process per rank.

A process that finds ``RANK`` in its environment is a rank, whoever started it (the verb, or torchrun).
"""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread

from areal_async.config.launch import LaunchSettings
from areal_async.config.trainer import EngineSettings
from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import Backend, Process, ProcessSpec
from areal_async.launch.backends import make_backend
from areal_async.launch.plan import places_of_ranks, rank_specs
from areal_async.launch.process_group import Death, end_all, run_together
from areal_async.process.host import LOOPBACK
from areal_async.process.interpreter import module_command

ECHO_S = 0.2
"""From one look at the output of another host's process to the next."""


def own_rank() -> int | None:
    """Return which rank this process is; None for the one that a person started."""
    rank = os.environ.get("RANK")
    return None if rank is None else int(rank)


def run_ranks(verb: str, words: Sequence[str], trainer: EngineSettings, launch: LaunchSettings, *, logs: Path) -> int:
    """Start a verb's ranks; the first of them keeps the terminal. Return its exit status.

    Raises:
        PipelineError: a rank failed; where it was a user's mistake, a UserError.
    """
    # Alone on its host it needs no other: a job of several hosts may well have it on one. Ray's may have no GPUs here.
    is_spread = trainer.num_hosts > 1 or launch.backend == "ray"
    backend = make_backend(launch if is_spread else LaunchSettings())
    base = ProcessSpec(
        name=verb,
        command=tuple(module_command("areal_async", verb, *words)),
        environment={"OMP_NUM_THREADS": str(trainer.num_threads)},
        output=None,
    )
    places = places_of_ranks(trainer, gpus=backend.gpus, hosts=backend.workers)

    async def run(output: IO[bytes]) -> Death | None:
        async with backend.running():
            address = await backend.address() if is_spread else LOOPBACK
            first, *others = rank_specs(
                base, trainer.num_ranks, directory=logs, places=places, address=address, addresses=backend.addresses
            )
            if backend.workers == backend.hosts:
                return await _run([replace(first, output=None), *others], backend)
            async with _echoing(output):
                return await _run([first, *others], backend)

    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / f"{verb}-0.out", "ab+") as output:
        output.seek(0, os.SEEK_END)
        death = anyio.run(run, output, backend_options={"use_uvloop": True})
    if death is None:
        return 0
    if death.name == f"{verb}-0":
        return death.status if death.status > 0 else 1  # it has said why
    error = UserError if death.status == UserError.exit_code else PipelineError
    raise error(death.sentence or str(death))


@asynccontextmanager
async def _echoing(output: IO[bytes]) -> AsyncIterator[None]:
    """Print what a process on another host adds to its output, until the block ends."""

    def echo() -> None:
        sys.stdout.buffer.write(output.read())
        sys.stdout.buffer.flush()

    async def run_echo() -> None:
        while True:
            await anyio.to_thread.run_sync(echo)
            await anyio.sleep(ECHO_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_echo)
        yield
        tasks.cancel_scope.cancel()
    echo()


async def _run(specs: Sequence[ProcessSpec], backend: Backend) -> Death | None:
    processes: list[Process] = []
    try:
        return await run_together(specs, backend, on_start=processes.append)
    finally:
        with anyio.CancelScope(shield=True):
            await end_all(processes, grace_s=0)
