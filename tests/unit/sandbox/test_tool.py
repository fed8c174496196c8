"""The tool tells a model what its program printed, and in words how it failed."""

import pytest

from areal_async.api import ToolCall
from areal_async.errors import UserError
from areal_async.rollout.tools.run import Toolbox
from areal_async.sandbox import SandboxLimits, python
from areal_async.sandbox.tool import MOST_CHARACTERS

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(6 * 7)", "42"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)", "out\nerr"),
        ("x = 1", "(it ended and printed nothing; print what you want to see)"),
        ("raise SystemExit(3)", "(ended with status 3)"),
        ("print('half')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "(ended with status -9)"),
    ],
)
async def test_what_is_printed_comes_back(code: str, told: str) -> None:
    assert await python(code) == told


async def test_an_error_is_told_with_its_line() -> None:
    told = await python("x = 1\nx / 0\n")

    assert 'File "program.py", line 2' in told
    assert told.endswith("ZeroDivisionError: division by zero\n(ended with status 1)")


async def test_no_call_sees_an_earlier_one() -> None:
    await python("open('/tmp/left', 'w').write('x'); import builtins; builtins.left = 1")

    assert await python("import os, builtins; print(os.listdir('/tmp'), hasattr(builtins, 'left'))") == "[] False"


async def test_a_program_without_end_or_measure_is_ended_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.sandbox.tool.LIMITS", SandboxLimits(wall_s=0.5))
    assert (
        await python("print('so far', flush=True)\nwhile True: pass") == "so far\n(ended after 0.5 s: it ran too long)"
    )


async def test_a_flood_keeps_its_start_and_its_end() -> None:
    told = await python("print('first'); print('x' * 20_000); print('last')")

    assert told.startswith("first\n")
    assert told.endswith("\nlast")
    assert "characters left out" in told
    assert len(told) < MOST_CHARACTERS + 100


async def test_a_text_that_is_no_program_is_told_so() -> None:
    assert "SyntaxError: " in await python("def")
    assert "source code string cannot contain null bytes" in await python("\0")


async def test_where_programs_cannot_be_isolated_it_is_no_answer_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused() -> None:
        raise UserError("sandbox: programs cannot be isolated on this machine")

    monkeypatch.setattr("areal_async.sandbox.tool.shared_sandbox", refused)
    with pytest.raises(UserError, match="cannot be isolated"):
        await python("print(1)")


async def test_a_model_calls_it_as_it_calls_any_tool() -> None:
    box = Toolbox([python], timeout_s=30)
    calls = [ToolCall(id="1", name="python", arguments={"code": "print(6 * 7)"})]
    calls += [ToolCall(id="2", name="python", arguments={"code": 7}), ToolCall(id="3", name="python", arguments={})]

    results = await box.run(calls)

    assert [(result.text.partition(":")[0], result.is_error) for result in results] == [
        ("42", False),
        ("error", True),
        ("error", True),
    ]
    (schema,) = box.schemas
    assert schema["function"]["parameters"]["properties"]["code"]["type"] == "string"
