"""Processes on this host: each in a session of its own, so that Ctrl-C reaches the launcher alone."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

import anyio
import anyio.abc

from areal_async.errors import PipelineError
from areal_async.launch.backend import LauncherWorks, ProcessSpec
from areal_async.process import stacks
from areal_async.process.children import open_child, signal_session
from areal_async.process.host import LOOPBACK
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped, read_tail
from areal_async.protocol.run_state import OrderedHosts

TAIL_BYTES = 16384
"""How far back the last sentence is looked for."""
MAX_ASKED = 8
"""Times that one process is asked where it stands: a run may stand still for days."""


class ChildProcess:
    """A child of this process, in a session of its own: what was started, or what stands for it."""

    noise: tuple[str, ...]
    """Beginnings of lines that say nothing of its end."""

    def __init__(self, spec: ProcessSpec, process: anyio.abc.Process, output_start_bytes: int) -> None:
        self.spec = spec
        self._process = process
        self._output_start_bytes = output_start_bytes
        self._num_asked = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        return await self._process.wait()

    def last_sentence(self) -> str:
        return self._last_line(self.noise)

    def _last_line(self, noise: tuple[str, ...] = ()) -> str:
        """Return the last line of its output that says something and does not begin with ``noise``.

        The frame that Python draws around a group of exceptions says nothing.
        """
        if self.spec.output is None:
            return ""
        lines = read_tail(self.spec.output, start_bytes=self._output_start_bytes, max_bytes=TAIL_BYTES).splitlines()
        said = (escaped(line).strip().lstrip("| ") for line in reversed(lines) if not line.startswith(noise))
        return next((line for line in said if line.strip("+-")), "")


async def start_child(spec: ProcessSpec, command: Sequence[str]) -> tuple[anyio.abc.Process, int]:
    """Start what stands for a process; return it, and where that begins which it adds to its output.

    Once it has started it is too late to ask where: it moves the position that both share.

    Raises:
        PipelineError: its program or its output file cannot be opened.
    """
    try:
        with _opened(spec.output) as output:
            start_bytes = output.tell() if output is not None else 0
            process = await open_child(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
            return process, start_bytes
    except OSError as exc:
        raise PipelineError(f"{spec.name}: cannot be started: {exc}") from exc


def _opened(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    """Have the output of a process, to be added to; None for this process's own."""
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab")


class LocalProcess(ChildProcess):
    """A child of this process; killed by the kernel when this process ends."""

    noise = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
    """Words of a grammar library as a process ends early, after the cause."""

    def terminate(self) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        if not self.has_ended:
            signal_session(self.pid, signal.SIGKILL)

    def ask_stacks(self) -> None:
        if not self.has_ended and self._num_asked < MAX_ASKED:
            self._num_asked += stacks.ask(self.pid)


class LocalBackend(LauncherWorks):
    """Starts children of this process."""

    hosts: tuple[str, ...] = (LOOPBACK,)
    absent: Mapping[str, str] = MappingProxyType({})

    def set_hosts(self, ordered: OrderedHosts) -> None:
        """Nothing is to be done for it: there is no other host."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Nothing is to be done for it."""
        return nullcontext()

    async def address(self) -> str:
        """Return that of this host for itself."""
        return LOOPBACK

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        """Return nothing: there is no other host."""
        return {}

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start one child.

        Raises:
            PipelineError: as ``start_child``.
        """
        return LocalProcess(spec, *await start_child(spec, guarded(spec.command)))
