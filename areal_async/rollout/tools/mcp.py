"""MCP servers as tools: what a server offers, the model may call.

    async with mcp_tools(["python", "server.py"]) as tools:          # a server of this trajectory's own
        done = await policy.act(messages, tools)

    tools = await shared_mcp_tools("http://127.0.0.1:8000/mcp")      # one connection for all of the node
    done = await policy.act(messages, [*tools, python])

A server of its own costs a process for each trajectory and is for tools that remember; a shared one must not. What a
tool answers is told as text, and its images are shown to a model that sees. A call that ends without an answer, because
the server died in it or its deadline passed, is told to the model as an error. A server that cannot be started is no
fault of the model's: it is the trajectory's failure.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from jsonschema import Draft202012Validator, SchemaError

from areal_async.errors import ToolError, WorkflowError
from areal_async.process.per_loop import PerLoop
from areal_async.rollout.tools.mcp_connection import START_DEADLINE_S, Address, McpConnection
from areal_async.rollout.tools.schema import function_schema

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock, Tool

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class McpTool:
    """One tool of a server, a ``contracts.DescribedTool``."""

    name: str
    """The name that the model is told: the server's own, with _ for what models do not write in names."""
    schema: dict[str, Any]
    timeout_s: float | None
    _own_name: str
    _connect: Callable[[], Awaitable[McpConnection]]

    async def call(self, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Call it at the server; its answer as text, or as parts of a content where it has images.

        Raises:
            ToolError: the tool or the server failed, in words for the model.
            WorkflowError: the server had to be started again, and could not be.
        """
        connection = await self._connect()
        result = await connection.call(self._own_name, arguments)
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{self.name}: failed without a word")
        has_images = any(block.type == "image" for block in result.content)
        return [_part(block) for block in result.content] if has_images else text


@asynccontextmanager
async def mcp_tools(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float | None = None,
    start_deadline_s: float = START_DEADLINE_S,
) -> AsyncIterator[list[McpTool]]:
    """Connect to a server for the time of the block, and enter with its tools.

    Args:
        server: a command as a list of words, spoken to by its standard input and output, or the URL of one that
            speaks streamable HTTP.
        env: variables for the command, beside HOME, PATH and their like; nothing else of ours is passed on.
        cwd: folder to start the command in; ``None`` for ours.
        timeout_s: for one call; ``None`` takes the one of ``policy.act``.
        start_deadline_s: seconds until it must have said what it offers.

    Raises:
        WorkflowError: the server cannot be used.
        UserError: the SDK is not installed.
    """
    address = Address.of(server, env=env, cwd=cwd, start_deadline_s=start_deadline_s)
    connection = McpConnection(address)
    try:
        await connection.opened()
        yield [_tool(tool, address, connection.opened, timeout_s) for tool in connection.tools]
    finally:
        connection.close()
        await connection.closed()  # where the trajectory is cancelled, the rest goes on without it


async def shared_mcp_tools(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float | None = None,
    start_deadline_s: float = START_DEADLINE_S,
) -> list[McpTool]:
    """Return the tools of a server that all trajectories of this node share: it is connected to once, and kept.

    It must remember nothing between two calls. When it dies, the calls that it had end as errors, and the next one
    starts it again; so does the next one after three in a row that had no answer. Arguments and errors as for
    ``mcp_tools``.
    """
    address = Address.of(server, env=env, cwd=cwd, start_deadline_s=start_deadline_s)
    shared = _shared.get().setdefault(address, _Shared(address))
    connection = await shared.connect()
    return [_tool(tool, address, shared.connect, timeout_s) for tool in connection.tools]


class _Shared:
    """A server of this event loop, connected to anew where its connection is broken. It ends with the loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: McpConnection | None = None

    async def connect(self) -> McpConnection:
        connection = self._connection
        if connection is None or connection.is_broken:
            if connection is not None:
                connection.close()
            connection = self._connection = McpConnection(self._address)
        return await connection.opened()


_shared = PerLoop[dict[Address, _Shared]]("mcp_shared", dict)


def _tool(
    tool: "Tool", address: Address, connect: Callable[[], Awaitable[McpConnection]], timeout_s: float | None
) -> McpTool:
    """Describe a tool as the model is told of it.

    Raises:
        WorkflowError: its schema is none.
    """
    try:
        Draft202012Validator.check_schema(tool.input_schema)
    except SchemaError as exc:
        raise WorkflowError(f"{address}: tool {tool.name!r:.100} has no valid schema: {exc.message:.200}") from exc
    name = _NOT_IN_NAMES.sub("_", tool.name)[:_MAX_NAME_CHARACTERS]
    return McpTool(
        name=name,
        schema=function_schema(name, tool.description, tool.input_schema),
        timeout_s=timeout_s,
        _own_name=tool.name,
        _connect=connect,
    )


def text_of(result: "CallToolResult") -> str:
    """Write an answer for a model: its texts, a word for what is no text, or else its structured content as JSON."""
    if result.content or result.structured_content is None:
        return "\n".join(_block_text(block) for block in result.content)
    return msgspec.json.encode(result.structured_content).decode()


def _part(block: "ContentBlock") -> dict[str, Any]:
    """Return a part of a content, an image with the word for it."""
    text = _block_text(block)
    if block.type != "image":
        return {"type": "text", "text": text}
    url = f"data:{block.mime_type};base64,{block.data}"
    return {"type": "image_url", "image_url": {"url": url}, "text": text}


def _block_text(block: "ContentBlock") -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}, {block.mime_type}, not shown]"
        case "resource_link":
            return f"[resource {block.uri}]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return text if isinstance(text, str) else f"[resource {block.resource.uri}, not shown]"
