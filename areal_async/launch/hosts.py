"""Hosts that the user names, each with an agent at the far end of a command that the user names too."""

import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from areal_async.config.launch import LaunchSettings
from areal_async.errors import UserError
from areal_async.launch.backend import LauncherWorks
from areal_async.launch.remote import FAREWELL_S, AgentLostError, AgentsBackend
from areal_async.process.children import open_child, signal_session
from areal_async.process.host import address_towards
from areal_async.process.interpreter import module_command
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped

SSH_PORT = 22
"""Any would do: nothing is sent there."""
MAX_LINE_BYTES = 1 << 20
AGENT = "areal_async.launch.agent"


class _Pipes:
    """The input and the output of a command that ends in an agent."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._said = ""
        """The last line of the command's errors."""

    async def send(self, line: bytes) -> None:
        try:
            await self._input.send(line)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise AgentLostError("its agent has closed its input") from exc

    async def receive(self) -> bytes:
        try:
            return await self._lines.receive_until(b"\n", MAX_LINE_BYTES)
        except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream, anyio.BrokenResourceError):
            with anyio.move_on_after(FAREWELL_S):
                status = await self._process.wait()
                await anyio.sleep(0.1)  # for its errors
                raise AgentLostError(self._said or f"its agent ended with status {status}") from None
            raise AgentLostError("its agent has closed its output") from None

    async def run_errors(self) -> None:
        """Keep the last line of its errors."""
        assert self._process.stderr is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in self._process.stderr:
                lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
                self._said = escaped(lines[-1]) if lines else self._said

    async def aclose(self) -> None:
        """Have the agent end, which its input's end tells it to."""
        with suppress(anyio.BrokenResourceError, OSError):
            await self._input.aclose()
        with anyio.move_on_after(FAREWELL_S):
            await self._process.wait()
        if self._process.returncode is None:
            signal_session(self._process.pid, signal.SIGKILL)
        await self._process.aclose()


class HostsBackend(LauncherWorks, AgentsBackend):
    """The hosts of ``launch.hosts``, beside this one."""

    def __init__(self, launch: LaunchSettings) -> None:
        super().__init__(launch.hosts)
        self._launch = launch

    async def address(self) -> str:
        """Return the address of this host that leads to the first of the others.

        Raises:
            UserError: this host knows no way there.
        """
        host = self.hosts[1]
        try:
            return await anyio.to_thread.run_sync(address_towards, host.rpartition("@")[2], SSH_PORT)
        except OSError as exc:
            raise UserError(
                f"launch.hosts: got {host}, to which this host knows no way ({exc}); set bus.host to an address of "
                "this host that all of them reach"
            ) from exc

    @asynccontextmanager
    async def way_to(self, host: str) -> AsyncIterator[_Pipes]:
        """Run the command that starts an agent there.

        Raises:
            AgentLostError: it cannot be run.
        """
        command = [*self._launch.words_for(host), *module_command(AGENT)]
        try:
            process = await open_child(
                guarded(command, by=signal.SIGTERM), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            raise AgentLostError(str(exc)) from exc
        pipes = _Pipes(process)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipes.run_errors)
                yield pipes
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await pipes.aclose()
