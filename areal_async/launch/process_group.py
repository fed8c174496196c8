"""Processes that live and die together: the first death ends the others, and one exit explains them all."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from areal_async.errors import UserError
from areal_async.launch.backend import Backend, Process, ProcessSpec

FAREWELL_S = 2.0
"""After one process has died, how long the others may still say why."""

MAX_SENTENCE = 500
"""Characters of a last line that are repeated to the user."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended with a status other than 0."""

    name: str
    status: int
    sentence: str
    """The last it wrote."""

    def __str__(self) -> str:
        if self.status in (-signal.SIGKILL, -signal.SIGTERM):  # from outside: what it wrote last is no cause
            return f"{self.name} ended by {signal.Signals(-self.status).name}"
        how = f"by signal {-self.status}" if self.status < 0 else f"with status {self.status}"
        return f"{self.name} ended {how}" + (f": {self.sentence[:MAX_SENTENCE]}" if self.sentence else "")


async def run_together(
    specs: Sequence[ProcessSpec], backend: Backend, *, on_start: Callable[[Process], None]
) -> Death | None:
    """Run processes until all have ended; return the death that explains the others, ``None`` when all exited 0.

    Args:
        on_start: takes each process as it is started. When this is cancelled they live on, and are the caller's.

    Raises:
        PipelineError: one cannot be started.
    """
    processes: list[Process] = []
    deaths: list[Death] = []
    num_ended = 0
    all_ended = anyio.Event()

    async def follow(process: Process) -> None:
        nonlocal num_ended
        status = await process.wait()
        num_ended += 1
        if num_ended == len(specs):
            all_ended.set()
        if status == 0:
            return
        deaths.append(Death(process.spec.name, status, process.last_sentence()))
        if len(deaths) == 1:
            with anyio.move_on_after(FAREWELL_S):
                await all_ended.wait()
            for other in processes:
                other.kill()

    async with anyio.create_task_group() as reap:
        for spec in specs:
            with anyio.CancelScope(shield=True):  # a process that nobody holds could not be ended
                processes.append(await backend.start(spec))
                on_start(processes[-1])
            reap.start_soon(follow, processes[-1])
    by_user = [death for death in deaths if death.status == UserError.exit_code]
    return next(iter(by_user or deaths), None)


async def end_all(processes: Sequence[Process], *, grace_s: float) -> None:
    """Ask processes to end, then end them; none is left. ``grace_s`` 0 does not ask."""
    async with anyio.create_task_group() as reap:
        for process in processes:
            reap.start_soon(process.wait)
        if grace_s > 0:
            for process in processes:
                process.terminate()
            with anyio.move_on_after(grace_s):
                for process in processes:
                    await process.wait()
        for process in processes:
            process.kill()
