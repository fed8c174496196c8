"""Processes on other hosts as well: one agent on each, at the far end of a command that the user names.

A host whose agent cannot be started, has ended or has said nothing for long is ``absent``, and what ran there is taken
for dead; its agent ends it too. It is tried again and again.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from areal_async.config.launch import LaunchSettings
from areal_async.errors import UserError
from areal_async.launch.agent import (
    ANSWER,
    BEAT,
    BEAT_S,
    ENDED,
    KILL,
    RUN,
    SILENT_S,
    STACKS,
    TERMINATE,
    Hello,
    News,
    Order,
    code_digest,
)
from areal_async.launch.backend import REMOVED, Process, ProcessSpec
from areal_async.launch.local import LocalBackend
from areal_async.process.children import signal_session
from areal_async.process.host import LOOPBACK, address_towards
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped
from areal_async.protocol.run_state import OrderedHosts

SSH_PORT = 22
"""Any would do: nothing is sent there."""
LOST_STATUS = 255
"""Of a process whose host is gone."""
CONNECT_DEADLINE_S = 60.0
FAREWELL_S = 10.0
"""For an agent to end, once all that it started has."""
RETRY_S = 2.0
MAX_LINE_BYTES = 1 << 20
AGENT = (sys.executable, "-m", "areal_async.launch.agent")

log = structlog.get_logger()


class RemoteProcess:
    """One process on another host."""

    def __init__(self, spec: ProcessSpec, link: "_Link | None", number: int) -> None:
        self.spec = spec
        self._link = link
        self._number = number
        self._status: int | None = None
        self._sentence = ""
        self._ended = anyio.Event()

    def end(self, status: int, sentence: str) -> None:
        """Take note of its end."""
        if self._status is None:
            self._status, self._sentence = status, sentence
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def terminate(self) -> None:
        self._order(TERMINATE)

    def kill(self) -> None:
        self._order(KILL)

    def ask_stacks(self) -> None:
        self._order(STACKS)

    def last_sentence(self) -> str:
        return self._sentence

    def _order(self, what: str) -> None:
        if self._status is None and self._link is not None:
            self._link.tell(Order(what, self._number))


class _Link:
    """The near end of one agent, for as long as it lives."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._heard = anyio.current_time()
        self._numbers = count(1)
        self._started: dict[int, RemoteProcess] = {}
        self._answers: dict[int, RemoteProcess] = {}
        self._send, self._orders = anyio.create_memory_object_stream[bytes](10_000)
        self.has_met = anyio.Event()
        self.said = ""
        """The last line of the command's errors."""

    def tell(self, order: Order | Hello) -> None:
        """Give an order; one to an agent that takes none any more is lost with it."""
        with suppress(anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._send.send_nowait(msgspec.json.encode(order) + b"\n")

    def start(self, spec: ProcessSpec) -> RemoteProcess:
        """Have a process started; one that cannot be has ended, with why not."""
        number = next(self._numbers)
        self._started[number] = started = RemoteProcess(spec, self, number)
        self.tell(Order.to_start(number, spec))
        return started

    async def run_question(self, *command: str) -> str:
        """Run a short command; return why it failed, or nothing."""
        number = next(self._numbers)
        spec = ProcessSpec(name="question", command=command, environment={}, output=None)
        self._answers[number] = answer = RemoteProcess(spec, None, number)
        self.tell(Order(RUN, number, command=command))
        return answer.last_sentence() if await answer.wait() else ""

    async def run(self) -> str:
        """Carry orders and news until the agent is gone; return why."""
        why = ""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_orders)
            tasks.start_soon(self._run_beats)
            tasks.start_soon(self._run_errors)
            why = await self._read()
            tasks.cancel_scope.cancel()
        return why

    async def wait_idle(self) -> None:
        """Wait until all that it had started has ended."""
        while self._started:
            await next(iter(self._started.values())).wait()

    def lose(self, why: str) -> None:
        """Take all that it had started for dead."""
        for process in (*self._started.values(), *self._answers.values()):
            process.end(LOST_STATUS, why)
        self._started.clear()
        self._send.close()
        self._orders.close()

    async def _read(self) -> str:
        """Take the agent's news until there is none; return why there is not.

        consumes:     lines of the agent
        waits for:    the next one
        produces:     ends of processes, and answers
        unblocked by: the agent, its end, or its silence
        """
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        while True:
            try:
                with anyio.fail_after(SILENT_S):
                    line = await lines.receive_until(b"\n", MAX_LINE_BYTES)
                news = msgspec.json.decode(line, type=News)
            except TimeoutError:
                return f"its agent has said nothing for {SILENT_S:g} s"
            except msgspec.MsgspecError:
                return f"what is no agent says: {escaped(line.decode(errors='replace'))[:200]}"
            except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream, anyio.BrokenResourceError):
                with anyio.move_on_after(FAREWELL_S):
                    status = await self._process.wait()
                    await anyio.sleep(0.1)  # for its errors
                    return self.said or f"its agent ended with status {status}"
                return "its agent has closed its output"
            if news.code and news.code != code_digest():
                return "it has another version of areal_async; install this one there"
            if news.code:
                self.has_met.set()
            ended = {ENDED: self._started, ANSWER: self._answers}.get(news.say, {}).pop(news.number, None)
            if ended is not None:
                ended.end(news.status, news.sentence)

    async def _run_orders(self) -> None:
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in self._orders:
                await self._process.stdin.send(line)

    async def _run_beats(self) -> None:
        """Say that the launcher lives.

        consumes:     nothing
        waits for:    the next beat
        produces:     beats
        unblocked by: cancellation alone
        """
        while True:
            await anyio.sleep(BEAT_S)
            self.tell(Order(BEAT))

    async def _run_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in self._process.stderr:
                lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
                self.said = escaped(lines[-1]) if lines else self.said


class HostsBackend:
    """Starts children of this process, and on other hosts those of agents."""

    def __init__(self, launch: LaunchSettings) -> None:
        self.hosts = (LOOPBACK, *launch.hosts)
        self.absent = dict.fromkeys(launch.hosts, "its agent has not been started yet")
        self._command = launch.remote_command
        self._local = LocalBackend()
        self._links: dict[str, _Link] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._removed: frozenset[str] = frozenset()
        self._keeping: dict[str, anyio.CancelScope] = {}
        """What ends the keeping of an agent, by its host."""

    def set_hosts(self, ordered: OrderedHosts) -> None:
        """Have an agent on each host that was added, and none on those that were removed."""
        self._removed = frozenset(ordered.removed)
        for host in {*self.hosts[1:], *ordered.added}:
            if host in self._removed:
                self.absent[host] = REMOVED
                if host in self._keeping:
                    self._start_soon(self._dismiss, host)
            elif host not in self._keeping:
                self.absent[host] = "its agent has not been started yet"
                self._keep(host, anyio.Event())
            elif host in self._links:
                self.absent.pop(host, None)

    async def _dismiss(self, host: str) -> None:
        """End the agent of a host that was removed, once what runs there has ended."""
        if (link := self._links.get(host)) is not None:
            await link.wait_idle()
        if host in self._removed and host in self._keeping:
            self._keeping.pop(host).cancel()

    def _keep(self, host: str, tried: anyio.Event) -> None:
        self._keeping[host] = anyio.CancelScope()
        self._start_soon(self._run_host, host, tried, self._keeping[host])

    def _start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(function, *arguments)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have an agent on each host; begins once each has been tried."""
        tried = {host: anyio.Event() for host in self.absent}
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for host, event in tried.items():
                self._keep(host, event)
            try:
                with anyio.move_on_after(CONNECT_DEADLINE_S):
                    for event in tried.values():
                        await event.wait()
                yield
            finally:
                tasks.cancel_scope.cancel()

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

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        """Run a piece of Python on each other host; return those where it fails, each with its last words."""
        failed = dict(self.absent)

        async def run(host: str, link: _Link) -> None:
            if why := await link.run_question(sys.executable, "-c", code, *words):
                failed[host] = why

        async with anyio.create_task_group() as asking:
            for host, link in self._links.items():
                asking.start_soon(run, host, link)
        return failed

    async def start(self, spec: ProcessSpec) -> Process:
        """Start a process; one on a host that is gone has ended, with why.

        Raises:
            PipelineError: on this host, as ``LocalBackend.start``.
        """
        if spec.host is None or spec.host == LOOPBACK:
            return await self._local.start(spec)
        if (link := self._links.get(spec.host)) is not None:
            return link.start(spec)
        lost = RemoteProcess(spec, None, 0)
        lost.end(LOST_STATUS, f"host {spec.host} is gone: {self.absent[spec.host]}")
        return lost

    async def _run_host(self, host: str, tried: anyio.Event, until: anyio.CancelScope) -> None:
        """Keep an agent on one host.

        consumes:     its ends
        waits for:    them
        produces:     a link, or why there is none
        unblocked by: cancellation, or the end of ``until``
        """
        with until:
            while True:
                why = await self._run_agent(host, tried)
                if why != self.absent.get(host):
                    log.warning("host.gone", host=host, reason=why)
                if host not in self._removed:
                    self.absent[host] = why
                tried.set()
                await anyio.sleep(RETRY_S)

    async def _run_agent(self, host: str, tried: anyio.Event) -> str:
        """Have one agent for as long as it lives; return why it does not any more."""
        command = [*shlex.split(self._command.format(host=host)), *AGENT]
        try:
            process = await anyio.open_process(
                guarded(command, by=signal.SIGTERM), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            return str(exc)
        link, why = _Link(process), "the run ends"
        link.tell(Hello(directory=os.getcwd(), environment=dict(os.environ)))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._admit, host, link, tried)
                why = await link.run()
                tasks.cancel_scope.cancel()
        finally:
            if self._links.get(host) is link:
                del self._links[host]
            if host not in self._links and host not in self._removed:  # it may be there again
                self.absent[host] = why
            link.lose(f"host {host} is gone: {why}")
            with anyio.CancelScope(shield=True):
                await _close(process)
        return why

    async def _admit(self, host: str, link: _Link, tried: anyio.Event) -> None:
        await link.has_met.wait()
        self._links[host] = link
        if host not in self._removed:
            self.absent.pop(host, None)
        log.info("host.joined", host=host)
        tried.set()


async def _close(process: anyio.abc.Process) -> None:
    """Have an agent end, which its input's end tells it to."""
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()
    with anyio.move_on_after(FAREWELL_S):
        await process.wait()
    if process.returncode is None:
        signal_session(process.pid, signal.SIGKILL)
    await process.aclose()
