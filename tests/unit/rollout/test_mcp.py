"""What MCP servers offer is called like any tool; whatever such a server does, callers go on and nothing is left."""

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_types import CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents, Tool

from areal_async import DescribedTool, ToolCall, ToolResult, mcp_tools, shared_mcp_tools
from areal_async.errors import ToolError, UserError, WorkflowError
from areal_async.process.host import free_port
from areal_async.rollout.tools import mcp_connection
from areal_async.rollout.tools.mcp import _tool as described
from areal_async.rollout.tools.mcp import text_of
from areal_async.rollout.tools.mcp_connection import Address, McpConnection
from areal_async.rollout.tools.run import Toolbox
from tests.unit.rollout.seeing import seeing_codec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PROGRAM = str(Path(__file__).parents[2] / "fakes" / "mcp_server.py")
STDIO = (sys.executable, PROGRAM)


@pytest.fixture
def anyio_backend() -> Any:
    """One loop, the node's: every test starts programs."""
    return "asyncio", {"use_uvloop": True}


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def ended(pid: int) -> None:
    with anyio.fail_after(60):
        while is_alive(pid):  # noqa: ASYNC110 -- a process that is not ours has no event
            await anyio.sleep(0.05)


async def come_of(
    tools: Sequence[DescribedTool], tool: str, *, timeout_s: float = 20.0, **arguments: Any
) -> ToolResult:
    call = ToolCall(id="call00001", name=tool, arguments=arguments)
    (result,) = await Toolbox(tools, timeout_s=timeout_s).run([call])
    return result


async def told(tools: Sequence[DescribedTool], tool: str, **arguments: Any) -> str:
    return (await come_of(tools, tool, **arguments)).text


@asynccontextmanager
async def served(port: int) -> AsyncIterator[str]:
    process = await anyio.open_process(
        [*STDIO, "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with anyio.fail_after(60):
            while not await is_listening(port):  # noqa: ASYNC110 -- of another process there is no event
                await anyio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def is_listening(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port):
            return True
    except OSError:
        return False


@asynccontextmanager
async def server_by(way: str) -> AsyncIterator[str | tuple[str, ...]]:
    if way == "stdio":
        yield STDIO
    else:
        async with served(free_port()) as url:
            yield url


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_model_is_told_of_a_servers_tools_and_what_comes_of_them(way: str) -> None:
    async with server_by(way) as server, mcp_tools(server) as tools:
        schema = next(tool.schema for tool in tools if tool.name == "add")
        results = {
            "good": await come_of(tools, "add", a=2, b=3),
            "bad arguments": await come_of(tools, "add", a="two"),
            "structured": await come_of(tools, "measure"),
            "image": await come_of(tools, "picture"),
            "raises": await come_of(tools, "refuse"),
            "long": await come_of(tools, "flood", megabytes=2),
            "slow": await come_of(tools, "wait", seconds=60, timeout_s=0.2),
            "after the slow one": await come_of(tools, "add", a=4),
        }
        seeing = Toolbox(tools, timeout_s=20.0, take_image=seeing_codec().images.take_part)
        (shown,) = await seeing.run([ToolCall(id="call00001", name="picture", arguments={})])

    function = schema["function"]
    assert (schema["type"], function["name"], function["description"]) == ("function", "add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert {name: result.is_error for name, result in results.items()} == {
        name: name in ("bad arguments", "raises", "slow") for name in results
    }
    assert results["good"].text == "5"
    assert "valid integer" in results["bad arguments"].text
    assert '"height": 3.5' in results["structured"].text
    assert (results["image"].text, results["image"].parts) == ("a pixel:\n[image, image/png, not shown]", [])
    assert shown.text == "a pixel:\n[image of 64 x 64]"
    assert [part["type"] for part in shown.message["content"]] == ["text", "image"]
    assert results["raises"].text.startswith("error: Error executing tool refuse")
    assert len(results["long"].text) < 21_000
    assert results["slow"].text == "error: wait: no answer within 0.2 s"
    assert results["after the slow one"].text == "5"


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_server_that_dies_in_a_call_ends_the_call_and_not_the_caller(way: str) -> None:
    async with server_by(way) as server, mcp_tools(server) as tools:
        result = await come_of(tools, "die")
        after = await come_of(tools, "add", a=1)

    assert result.is_error
    assert "ended during the call" in result.text
    assert after.is_error
    assert "no longer there" in after.text
    if way == "stdio":
        assert "the disk is on fire" in result.text


async def test_each_block_has_a_server_of_its_own_that_ends_with_it() -> None:
    async with mcp_tools(STDIO, env={"COLOUR": "red"}) as tools, mcp_tools(STDIO) as others:
        counts = [await told(tools, "tick"), await told(tools, "tick"), await told(others, "tick")]
        colours = [await told(tools, "variable", name="COLOUR"), await told(others, "variable", name="COLOUR")]
        pid = int(await told(tools, "process"))
        assert is_alive(pid)

    assert counts == ["1", "2", "1"]
    assert colours == ["red", ""]
    assert not is_alive(pid)


async def test_secrets_of_ours_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SECRET", "42")

    async with mcp_tools(STDIO) as tools:
        assert await told(tools, "variable", name="AREAL_SECRET") == ""


async def test_cancelled_trajectory_leaves_no_process() -> None:
    pids = []
    with anyio.move_on_after(60) as scope:
        async with mcp_tools((*STDIO, "stubborn")) as tools:
            pids.append(int(await told(tools, "process")))
            scope.cancel()
            await told(tools, "wait", seconds=60)

    assert scope.cancelled_caught
    await ended(pids[0])


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ((*STDIO, "silent"), "no answer within 0.5 s"),
        ((*STDIO, "broken"), "no such thing as a server"),
        (("/no/such/program",), "No such file or directory"),
        ("http://127.0.0.1:9/mcp", "cannot be used"),
        ("python server.py", "need a URL or a command as a list of words"),
        ((), "need a program"),
    ],
)
async def test_server_that_cannot_be_used_is_the_trajectorys_failure(server: Any, reason: str) -> None:
    start_deadline_s = 0.5 if "silent" in server else 60.0

    with pytest.raises(WorkflowError, match=reason):
        async with mcp_tools(server, start_deadline_s=start_deadline_s):
            pass


async def test_shared_server_is_one_and_starts_again_after_its_death() -> None:
    tools, again = await shared_mcp_tools(STDIO), await shared_mcp_tools(STDIO)
    first = int(await told(tools, "process"))
    assert await told(again, "process") == str(first)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come_of, tools, "wait")
        died = await come_of(tools, "die")
    second = int(await told(again, "process"))

    assert died.is_error
    assert second != first
    await ended(first)


async def test_shared_server_that_hangs_is_started_again() -> None:
    tools = await shared_mcp_tools(STDIO)
    first = int(await told(tools, "process"))

    for _ in range(mcp_connection.MAX_UNANSWERED):
        assert (await come_of(tools, "block", timeout_s=0.1)).is_error
    second = int(await told(tools, "process"))

    assert second != first
    await ended(first)


def test_shared_server_ends_with_the_loop() -> None:
    async def use() -> int:
        tools = await shared_mcp_tools(STDIO)
        return int(await told(tools, "process"))

    for use_uvloop in (False, True):
        pid = anyio.run(use, backend_options={"use_uvloop": use_uvloop})
        anyio.run(ended, pid)


def test_server_dies_with_a_process_that_is_killed() -> None:
    code = (
        "import anyio, areal_async\n"
        "async def main():\n"
        f"    async with areal_async.mcp_tools({(*STDIO, 'stubborn')!r}) as tools:\n"
        "        print(await next(one for one in tools if one.name == 'process').call({}), flush=True)\n"
        "        await anyio.sleep(60)\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()

    anyio.run(ended, pid)


@pytest.mark.parametrize("flood", ["line", "lines"])
async def test_server_that_floods_is_given_up_at_its_deadline_while_the_loop_goes_on(flood: str) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await anyio.sleep(0.01)
            beats += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        with pytest.raises(WorkflowError, match="no answer within 2 s"):
            async with mcp_tools((*STDIO, flood), start_deadline_s=2.0):
                pass
        tasks.cancel_scope.cancel()

    assert beats > 20


@pytest.mark.parametrize("broken", [{"type": "nonsense"}, {"type": "object", "properties": {"a": {"type": 5}}}])
def test_schema_that_is_none_is_refused_with_the_tools_name(broken: dict[str, Any]) -> None:
    offered = Tool(name="odd", input_schema=broken)

    with pytest.raises(WorkflowError, match="MCP server .*: tool 'odd' has no valid schema"):
        described(offered, Address(url="http://a/mcp"), never, None)


def test_name_that_models_do_not_write_is_written_otherwise() -> None:
    offered = Tool(name="files/read.text", input_schema={"type": "object"})

    assert described(offered, Address(url="http://a/mcp"), never, None).name == "files_read_text"


async def never() -> McpConnection:
    raise AssertionError


def test_structured_content_alone_is_told_as_json_and_resources_by_their_text() -> None:
    inline = EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="the text"))
    link = ResourceLink(uri="file:///b", name="b")

    assert text_of(CallToolResult(content=[], structured_content={"a": [1]})) == '{"a":[1]}'
    assert text_of(CallToolResult(content=[inline, link])) == "the text\n[resource file:///b]"
    assert text_of(CallToolResult(content=[])) == ""


async def test_missing_sdk_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UserError, match=r"pip install 'areal-async\[mcp\]'"):
        await shared_mcp_tools(["python", "server.py"])


def test_package_is_imported_without_the_sdk() -> None:
    code = "import sys, areal_async; areal_async.mcp_tools; sys.exit('mcp' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_described_tool_without_a_good_name_is_refused() -> None:
    class Nameless:
        schema = {"type": "function"}
        timeout_s = None

        async def call(self, arguments: Any) -> Any:
            raise ToolError("never")

    with pytest.raises(WorkflowError, match="got name None in a schema"):
        Toolbox([Nameless()], timeout_s=1)
