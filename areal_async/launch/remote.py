"""Processes on other hosts as well: one agent on each, whatever the way to it.

A host whose agent cannot be started, has ended or has said nothing for long is ``absent``, and what ran there is taken
for dead; its agent ends it too. It is tried again and again.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from typing import Any, Protocol

import anyio
import anyio.abc
import msgspec
import structlog

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
    AgentNews,
    Hello,
    Order,
    code_digest,
)
from areal_async.launch.backend import REMOVED, Process, ProcessSpec
from areal_async.launch.local import LocalBackend
from areal_async.process.host import LOOPBACK
from areal_async.process.plain_text import escaped
from areal_async.protocol.run_state import OrderedHosts

LOST_STATUS = 255
"""Of a process whose host is gone."""
CONNECT_DEADLINE_S = 60.0
FAREWELL_S = 10.0
"""For an agent to end, once all that it started has."""
RETRY_S = 2.0

log = structlog.get_logger()


class AgentLostError(Exception):
    """There is no agent any more; the sentence says why."""


class Way(Protocol):
    """What carries lines to an agent, and from it."""

    async def send(self, line: bytes) -> None:
        """Give it an order.

        Raises:
            AgentLostError: it takes none any more.
        """

    async def receive(self) -> bytes:
        """Wait for its next news.

        Raises:
            AgentLostError: there will be none.
        """


class RemoteProcess:
    """One process on another host."""

    def __init__(self, spec: ProcessSpec, link: "Link | None", number: int) -> None:
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


class Link:
    """The near end of one agent, for as long as it lives."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._numbers = count(1)
        self._started: dict[int, RemoteProcess] = {}
        self._answers: dict[int, RemoteProcess] = {}
        self._send, self._orders = anyio.create_memory_object_stream[bytes](10_000)
        self.has_met = anyio.Event()

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
        while True:
            try:
                with anyio.fail_after(SILENT_S):
                    line = await self._way.receive()
                news = msgspec.json.decode(line, type=AgentNews)
            except TimeoutError:
                return f"its agent has said nothing for {SILENT_S:g} s"
            except msgspec.MsgspecError:
                return f"what is no agent says: {escaped(line.decode(errors='replace'))[:200]}"
            except AgentLostError as exc:
                return str(exc)
            if news.code and news.code != code_digest():
                return "it has another version of areal_async; install this one there"
            if news.code:
                self.has_met.set()
            ended = {ENDED: self._started, ANSWER: self._answers}.get(news.say, {}).pop(news.number, None)
            if ended is not None:
                ended.end(news.status, news.sentence)

    async def _run_orders(self) -> None:
        with suppress(AgentLostError):
            async for line in self._orders:
                await self._way.send(line)

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


class AgentsBackend:
    """Starts children of this process, and on other hosts those of agents."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` are those of the other hosts."""
        self.hosts = (LOOPBACK, *names)
        self.absent = dict.fromkeys(names, "its agent has not been started yet")
        self._local = LocalBackend()
        self._links: dict[str, Link] = {}
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

    def way_to(self, host: str) -> AbstractAsyncContextManager[Way]:
        """Start an agent on a host, and end it with the block.

        Raises:
            AgentLostError: it cannot be started.
        """
        raise NotImplementedError

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

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        """Run a piece of Python on each other host; return those where it fails, each with its last words."""
        failed = dict(self.absent)

        async def run(host: str, link: Link) -> None:
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
                self._miss(host, await self._run_agent(host, tried))
                tried.set()
                await anyio.sleep(RETRY_S)

    async def _run_agent(self, host: str, tried: anyio.Event) -> str:
        """Have one agent for as long as it lives; return why it does not any more."""
        why = "the run ends"
        try:
            async with self.way_to(host) as way:
                link = Link(way)
                link.tell(Hello(directory=os.getcwd(), environment=dict(os.environ)))
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._admit, host, link, tried)
                        why = await link.run()
                        tasks.cancel_scope.cancel()
                finally:
                    if self._links.get(host) is link:
                        del self._links[host]
                    if host not in self._links:  # it may be there again
                        self._miss(host, why)
                    link.lose(f"host {host} is gone: {why}")
        except AgentLostError as exc:
            return str(exc)
        return why

    def _miss(self, host: str, why: str) -> None:
        """Have a host absent; one that still is, for the same reason, is not spoken of again."""
        if host not in self._removed and why != self.absent.get(host):
            log.warning("host.gone", host=host, reason=why)
            self.absent[host] = why

    async def _admit(self, host: str, link: Link, tried: anyio.Event) -> None:
        await link.has_met.wait()
        self._links[host] = link
        if host not in self._removed:
            self.absent.pop(host, None)
        log.info("host.joined", host=host)
        tried.set()
