"""The Hugging Face folders of versions: made from checkpoints when they are first served, and held while they are.

Several processes may serve one run. Invariant: a folder is whole once it has its name, nobody deletes one, or the
checkpoint that it was made from, while somebody serves it, and of those that nobody serves one is kept.
"""

import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import structlog

from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, held, keep_newest
from areal_async.process.file_locks import try_lock
from areal_async.process.interpreter import module_command
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped

LEASE = "config.json"
"""In each folder: those who serve it hold it by that file."""
LOCK_POLL_S = 0.2
NICENESS = "10"
"""Answers go first."""
MAX_CAUSE = 500

log = structlog.get_logger()


class Versions(Protocol):
    """Where versions come from."""

    def resolve(self, wanted: str) -> str:
        """Return the version that is meant. Reads files; called in a thread.

        Raises:
            UserError: there is none.
        """

    def held(self, version: str) -> AbstractAsyncContextManager[Path]:
        """Have the folder of a version for as long as the block lasts.

        Raises:
            UserError: it cannot be had.
        """

    async def tidy(self) -> None:
        """Remove what nobody holds and nobody is likely to want."""


class OneModel:
    """A model without a run: one version, called like its folder."""

    def __init__(self, path: str, name: str) -> None:
        self._path = path
        self._name = name

    def resolve(self, wanted: str) -> str:
        """Return its name."""
        return self._name

    @asynccontextmanager
    async def held(self, version: str) -> AsyncIterator[Path]:
        """Give its folder."""
        yield Path(self._path)

    async def tidy(self) -> None:
        """Leave it."""


class RunVersions:
    """The checkpoints of a run."""

    def __init__(self, run_directory: Path, exported: Path, resolve: Callable[[str], str]) -> None:
        """Take the folder in which their models are made, and how one is found that a person types something for."""
        self._run_directory = run_directory
        self._exported = exported
        self.resolve = resolve

    @asynccontextmanager
    async def held(self, version: str) -> AsyncIterator[Path]:
        """Have the folder of a version for as long as the block lasts.

        Raises:
            UserError: there is no such checkpoint, or it cannot be exported.
        """
        folder = self._exported / version
        with ExitStack() as leases:
            leases.enter_context(held(self._run_directory / "checkpoints" / version, LEDGER))
            async with self._locked():
                if not (folder / LEASE).is_file():
                    await self._export(version, folder)
                leases.enter_context(held(folder, LEASE))
            yield folder
        await self.tidy()

    async def tidy(self) -> None:
        """Remove the folders that nobody serves, but for one: what was ended at once has left its own behind."""
        try:
            async with self._locked():
                await anyio.to_thread.run_sync(partial(keep_newest, self._exported, 1, lease=LEASE))
        except OSError as exc:  # who leaves next tries again
            log.warning("serve.not_tidied", cause=str(exc))

    async def _export(self, version: str, folder: Path) -> None:
        """Write a folder in another process: it takes torch, memory and seconds of a whole core."""
        verb = ["export", "--run", str(self._run_directory), "--checkpoint", version, "--output", str(folder)]
        command = guarded(["nice", "-n", NICENESS, *module_command("areal_async", *verb)])
        done = await anyio.run_process(command, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise UserError(f"version {version}: cannot be exported: {escaped(said[-1])[:MAX_CAUSE]}")

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Be the only one who makes or deletes folders here."""
        self._exported.mkdir(parents=True, exist_ok=True)
        with (self._exported / "lock").open("a") as file:
            while not try_lock(file):  # noqa: ASYNC110  # of another process: nothing here tells when it is done
                await anyio.sleep(LOCK_POLL_S)
            yield
