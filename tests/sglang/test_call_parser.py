"""The real server's own parser of tool calls, and the embedded engine that says it has none."""

from typing import Any

import pytest

from areal_async.errors import GenerationError
from areal_async.inference.call_parser import EngineCallParser, FoundCalls
from areal_async.inference.http import make_client
from areal_async.inference.pool import ServerPool
from areal_async.rollout.tools.parse import WrittenCall, read_found
from areal_async.rollout.tools.schema import describe_tool
from tests.sglang.conftest import SglangServer
from tests.unit.inference.embedded_engine import Server

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

HERMES = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LLAMA = '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}'
ADD = WrittenCall("add", {"a": 2, "b": 3}, "")


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def found(server: Server, name: str, text: str) -> FoundCalls:
    pool = ServerPool(["s0"], deadline_s=60)
    pool.admit(pool.servers["s0"], url=str(server.http.base_url).rstrip("/"), version="0-0")
    async with make_client(max_connections=2) as http:
        return await EngineCallParser(pool, http, name=name).find(text, [describe_tool(add).schema])


@pytest.mark.parametrize(
    ("name", "text", "content"), [("qwen25", HERMES, "I add."), ("hermes", HERMES, "I add."), ("llama3", LLAMA, "")]
)
async def test_calls_are_found_as_the_model_wrote_them(server: Server, name: str, text: str, content: str) -> None:
    if not isinstance(server, SglangServer):
        with pytest.raises(GenerationError, match="tool calls: s0 refused"):
            await found(server, name, text)
        return

    result = await found(server, name, text)

    assert result.normal_text.strip() == content
    assert [read_found(call.name, call.parameters) for call in result.calls] == [ADD]


async def test_text_is_no_call_and_a_parser_that_is_not_there_is_refused(server: Server) -> None:
    if isinstance(server, SglangServer):
        assert await found(server, "qwen25", "It is 5.") == FoundCalls(normal_text="It is 5.", calls=[])
    with pytest.raises(GenerationError, match="tool calls: s0 refused"):
        await found(server, "no_such_parser", HERMES)
