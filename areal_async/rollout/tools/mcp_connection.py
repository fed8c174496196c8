"""A running MCP server and the connection to it, by the official SDK (an extra: ``areal-async[mcp]``).

The SDK's task groups must be left by the task that entered them, and cancel it when the transport breaks. So one task
of its own holds each connection, and callers call from outside: a server that dies, hangs or floods ends
calls, never a caller. A server that is a child dies with this process, however that ends.
"""

import asyncio
import contextvars
import importlib
import importlib.util
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from areal_async.errors import ToolError, UserError, WorkflowError
from areal_async.process.parent_death import guarded
from areal_async.process.per_loop import PerLoop
from areal_async.rollout.user_code.boundary import attributed_to
from areal_async.rollout.user_code.task_scope import mark_retrieved
from areal_async.telemetry import wait_graph

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters
    from mcp_types import CallToolResult, Tool

START_DEADLINE_S = 60.0
MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Servers that start at once on a node; each is a program that loads."""
MAX_TOOLS = 256
MAX_UNANSWERED = 3
"""Calls in a row that were given up without an answer, after which a server counts as hung."""
MAX_SAID_BYTES = 4000
"""Size of what is kept of a server's standard error: its end."""
MAX_CAUSE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is: a command to start, or a URL."""

    url: str = ""
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    start_deadline_s: float = START_DEADLINE_S

    @classmethod
    def of(
        cls, server: str | Sequence[str], *, env: Mapping[str, str] | None, cwd: str | None, start_deadline_s: float
    ) -> Self:
        """Take what users write.

        Raises:
            WorkflowError: neither a URL nor a command.
        """
        if isinstance(server, str):
            if not server.startswith(("http://", "https://")):
                raise WorkflowError(f"MCP server: got {server!r:.100}, need a URL or a command as a list of words")
            return cls(url=server, start_deadline_s=start_deadline_s)
        if not server or not all(isinstance(word, str) for word in server):
            raise WorkflowError(f"MCP server: got command {list(server)!r:.100}, need a program and its arguments")
        variables = tuple(sorted((env or {}).items()))
        return cls(command=tuple(server), env=variables, cwd=cwd, start_deadline_s=start_deadline_s)

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r:.200}"


class McpConnection:
    """One connection, from its making on: ``opened`` waits until it stands, ``call`` calls, ``close`` ends it."""

    def __init__(self, address: Address) -> None:
        """Start connecting.

        Raises:
            UserError: the SDK is not installed.
        """
        if importlib.util.find_spec("mcp") is None:
            raise UserError("mcp_tools: the MCP SDK is not installed; pip install 'areal-async[mcp]'")
        self.address = address
        self.tools: list[Tool] = []
        """What it offers, once it stands."""
        self._client: Client | None = None
        self._said = b""
        self._is_lost = False
        self._num_unanswered = 0
        self._calls: set[asyncio.Future[CallToolResult]] = set()
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        # Of no trajectory: the connection may outlive the one that asked for it first.
        self._task = asyncio.create_task(self._hold(), name=str(address), context=contextvars.Context())
        self._task.add_done_callback(self._end)

    @property
    def is_broken(self) -> bool:
        """Whether nothing more is to be had from it."""
        return self._task.done() or self._is_lost or self._num_unanswered >= MAX_UNANSWERED

    async def opened(self) -> Self:
        """Wait until the server has said what it offers.

        Raises:
            WorkflowError: it did not, within its deadline or at all.
        """
        with wait_graph.on(str(self.address), "the start of"):
            await self._opened.wait()
        if self._client is None:
            raise WorkflowError(f"{self.address}: cannot be used: {self._cause()}")
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> "CallToolResult":
        """Call a tool; cancel to give it up.

        Raises:
            ToolError: the server answered with an error of the protocol, or is gone.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._client is None or self.is_broken:
            raise ToolError(f"{self.address}: no longer there: {self._cause()}")
        call = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(mark_retrieved)
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._num_unanswered += 1
            raise
        finally:
            call.cancel()
        if not call.done() or call.cancelled():
            raise ToolError(f"{self.address}: ended during the call: {self._cause()}")
        self._num_unanswered = 0
        try:
            return call.result()
        except MCPError as exc:
            if exc.code == CONNECTION_CLOSED:
                self._is_lost = True
                raise ToolError(f"{self.address}: ended during the call: {self._cause(exc.message)}") from exc
            raise ToolError(exc.message[:MAX_CAUSE_CHARACTERS]) from exc

    def close(self) -> None:
        """Have it end, the server's process too."""
        self._closing.set()
        if self._client is None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until it has ended."""
        await asyncio.wait({self._task})

    async def _hold(self) -> None:
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(_starting.get())
            try:
                with attributed_to(ToolError, "the connection broke"):
                    await self._connect(starting)
            finally:
                self._opened.set()

    async def _connect(self, starting: AsyncExitStack) -> None:
        await anyio.to_thread.run_sync(importlib.import_module, "mcp")  # takes a second, which is not for the loop
        from mcp import Client

        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)  # what it has to say is told with the call
        with anyio.CancelScope(deadline=anyio.current_time() + self.address.start_deadline_s) as scope:
            async with self._transport() as transport, Client(transport, cache=None) as client:
                self.tools = await _list_tools(client)
                self._client = client
                scope.deadline = math.inf
                await starting.aclose()
                self._opened.set()
                await self._closing.wait()
        if scope.cancelled_caught:
            raise ToolError(f"no answer within {self.address.start_deadline_s:g} s")

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        from mcp.client.stdio import stdio_client

        if self.address.url:
            yield self.address.url
            return
        reading, writing = os.pipe()
        try:
            with os.fdopen(writing, "w") as errors:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._keep_said, reading)
                    yield stdio_client(self._parameters(), errlog=errors)
                    tasks.cancel_scope.cancel()
        finally:
            os.close(reading)

    def _parameters(self) -> "StdioServerParameters":
        """Return how to start it: with the SDK's few variables and its own, killed by the kernel when we are gone."""
        from mcp.client.stdio import StdioServerParameters

        command, *args = guarded(self.address.command)
        return StdioServerParameters(command=command, args=args, env=dict(self.address.env), cwd=self.address.cwd)

    async def _keep_said(self, reading: int) -> None:
        while True:
            await anyio.wait_readable(reading)
            data = os.read(reading, 1 << 16)
            if not data:
                return
            self._said = (self._said + data)[-MAX_SAID_BYTES:]

    def _cause(self, otherwise: str = "closed") -> str:
        """Return why it ended: what the server said last, else what the SDK says."""
        lines = [line for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        error = None if not self._task.done() or self._task.cancelled() else self._task.exception()
        if self._num_unanswered >= MAX_UNANSWERED:
            return f"{self._num_unanswered} calls in a row had no answer"
        words = [*([str(error)] if error else []), *([lines[-1].strip()] if lines else [])]
        return (": ".join(words) or otherwise)[:MAX_CAUSE_CHARACTERS]

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._opened.set()  # a task that is cancelled before it runs sets nothing
        mark_retrieved(task)


async def _list_tools(client: "Client") -> "list[Tool]":
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MAX_TOOLS or (cursor and not page.tools):
            raise ToolError(f"got {len(tools)} tools and no end, need at most {MAX_TOOLS}")
        if not cursor:
            return tools


_starting = PerLoop("mcp_starting", lambda: anyio.Semaphore(MAX_STARTING))
"""Places of servers that start; one that has started gives its own back."""
