"""The servers' own parser of tool calls: asked for each reply, its errors are the trajectory's, with their cause."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from areal_async.config.settings import InferenceSettings, Settings
from areal_async.errors import GenerationError, UserError
from areal_async.inference.call_parser import EngineCallParser, FoundCall, FoundCalls
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import check_tool_call_parser
from areal_async.inference.pool import ServerPool
from tests.fakes.fake_sglang import FakeSglang

pytestmark = pytest.mark.anyio

ROUTE = "/parse_function_call"
GOOD = {"normal_text": "I add.", "calls": [{"tool_index": 0, "name": "add", "parameters": '{"a": 2}'}]}


@asynccontextmanager
async def parser_of(*servers: FakeSglang) -> AsyncIterator[tuple[EngineCallParser, ServerPool]]:
    async with AsyncExitStack() as stack:
        pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=60)
        for known, server in zip(pool.servers.values(), servers, strict=True):
            await stack.enter_async_context(server)
            pool.admit(known, url=server.url, version=server.version)
        settings = InferenceSettings(tool_call_parser="qwen25")
        client = await stack.enter_async_context(InferenceClient(pool, settings, max_streams=4, vocab_size=1 << 20))
        assert client.call_parser is not None
        yield client.call_parser, pool


def answering(status: int, body: dict[str, Any]) -> FakeSglang:
    server = FakeSglang()
    server.failing[ROUTE] = (status, body)
    return server


async def test_what_the_server_finds_is_returned() -> None:
    async with parser_of(answering(200, GOOD)) as (parser, pool):
        found = await parser.find("...", [])

    assert found == FoundCalls(normal_text="I add.", calls=[FoundCall(name="add", parameters='{"a": 2}')])
    assert [server.num_requests for server in pool.servers.values()] == [0]


async def test_server_that_said_the_reply_is_asked_and_another_where_it_is_gone() -> None:
    gone, other = answering(200, GOOD), answering(200, {"normal_text": "other", "calls": []})
    async with parser_of(gone, other) as (parser, pool):
        preferred = pool.servers["s0"]
        first = await parser.find("...", [], preferred=preferred)
        await gone.__aexit__()
        second = await parser.find("...", [], preferred=preferred)

    assert (first.normal_text, second.normal_text) == ("I add.", "other")
    assert preferred.doubt


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (400, {"detail": "no such parser"}, "s0 refused: .*status 400: no such parser"),
        (500, {"error": {"message": "boom"}}, "s0 refused: .*status 500"),
        (200, {"success": True}, "s0 answered .*missing required field `normal_text`"),
    ],
)
async def test_answer_that_is_none_is_an_error_with_its_cause(status: int, body: dict[str, Any], cause: str) -> None:
    async with parser_of(answering(status, body)) as (parser, _):
        with pytest.raises(GenerationError, match=f"tool calls: {cause}"):
            await parser.find("...", [])


def test_parser_is_refused_where_the_engine_has_none() -> None:
    settings = Settings(inference=InferenceSettings(backend="embedded", tool_call_parser="qwen25"))

    with pytest.raises(UserError, match="got qwen25, but the embedded engine has no parsers"):
        check_tool_call_parser(settings.inference)
    check_tool_call_parser(InferenceSettings(backend="sglang", tool_call_parser="qwen25"))
    check_tool_call_parser(InferenceSettings(backend="embedded"))
