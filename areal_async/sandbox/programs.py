"""A few warm sandboxes, shared by all who have a program to run: rewards and tools are plain functions."""

import os
from contextlib import AsyncExitStack

import anyio
import structlog

from areal_async.errors import RewardError, UserError, leaves_of
from areal_async.sandbox.escape_suite import ESCAPES
from areal_async.sandbox.limits import End, ProgramResult, SandboxLimits
from areal_async.sandbox.worker import SandboxGone, SandboxWorker

TRIAL = SandboxLimits(wall_s=60.0, cpu_s=2)
"""By processor time: on a busy machine a program that is held may wait for seconds, and says nothing of the wall."""
MAX_STARTS = 3

log = structlog.get_logger()


class Sandbox:
    """Runs programs, at most ``size`` at once; more wait for their turn."""

    def __init__(self, *, size: int = 1, limits: SandboxLimits | None = None) -> None:
        """``limits``: of programs that are given none of their own."""
        self._limits = limits or SandboxLimits()
        self._free = [SandboxWorker() for _ in range(size)]
        self._all = list(self._free)
        self._turns = anyio.Semaphore(size)

    async def __aenter__(self) -> "Sandbox":
        """Start all, and try to break out of one.

        Raises:
            UserError: programs cannot be isolated here, or one came through the walls.
        """
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_exit(self)
            try:
                async with anyio.create_task_group() as starting:
                    for warm in self._all:
                        starting.start_soon(warm.start)
            except ExceptionGroup as errors:
                raise leaves_of(errors)[0] from None  # raised in an except*, Python before 3.11.4 would wrap it again
            await self._try_walls()
            unless_started.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            for warm in self._all:
                await warm.stop()

    async def run(self, source: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> ProgramResult:
        """Run one program from its source, as ``__main__`` of a fresh Python.

        Raises:
            UserError: no sandbox can be started any more.
            RewardError: several ended under this program, which nobody has seen a program do: the program's trajectory
                fails, and the run goes on.
        """
        async with self._turns:
            warm = self._free.pop()
            try:
                for _ in range(MAX_STARTS):
                    if not warm.is_running:
                        await warm.stop()
                        await warm.start()
                    try:
                        return await warm.run(source.encode(errors="surrogatepass"), stdin, limits or self._limits)
                    except SandboxGone as exc:
                        log.warning("sandbox.gone", cause=str(exc))
            finally:
                self._free.append(warm)
        raise RewardError(
            f"sandbox: got {MAX_STARTS} sandboxes that ended under one program, need one that lasts; see the log"
        )

    async def _try_walls(self) -> None:
        """Run the programs that would break out of a worse sandbox at once.

        Raises:
            UserError: one did.
        """
        for name, source in ESCAPES.items():
            execution = await self.run(source, limits=TRIAL)
            if execution.end is End.ENDED and execution.stdout.strip() == b"held":
                continue
            raise UserError(
                f"sandbox: the wall against {name!r} does not hold on this machine "
                f"({execution.end}, {(execution.stdout + execution.stderr)[-200:]!r}); no program is run here"
            )


_LOCK = anyio.Lock()
_SHARED: list[Sandbox] = []


async def shared_sandbox() -> Sandbox:
    """Return the sandbox of this process, with a place per core; the first call starts it.

    It ends with the thread that started it: nothing has to be closed.

    Raises:
        UserError: programs cannot be isolated here.
    """
    async with _LOCK:
        if not _SHARED:
            _SHARED.append(await Sandbox(size=os.cpu_count() or 1).__aenter__())
        return _SHARED[0]
