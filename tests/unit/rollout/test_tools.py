"""A plain function is a tool: the model is told its signature, its arguments are checked, and it always gets an answer.

Whatever a model writes is a call, no call, or a call with a fault that it is told of.
"""

import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal, get_args

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async import tool
from areal_async.api import ToolCall, ToolResult
from areal_async.errors import GenerationError, Reject, ToolError, WorkflowError
from areal_async.rollout.tools import run as running
from areal_async.rollout.tools import schema as reading
from areal_async.rollout.tools.parse import ToolFormat, WrittenCall, guess_format, parse_reply
from areal_async.rollout.tools.run import MAX_CALLS_PER_REPLY, MAX_OUTPUT_CHARACTERS, Toolbox, as_text
from areal_async.rollout.tools.schema import describe_tool, read_docstring
from tests.brokers import until

pytestmark = pytest.mark.anyio

ADD = WrittenCall("add", {"a": 2, "b": 3}, "")


PIECES = [
    "<tool_call>", "</tool_call>", '{"name"', ': "a"', "}", "[", "\n", ";", "<think>", "</think>", "<function=a>",
    "</function>", "<parameter=b>", "</parameter>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "functions.a:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "```json", "{}", "<|start|>", "<|channel|>", "analysis", "commentary to=functions.a", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>",
]  # fmt: skip


# What the model writes


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "", [ADD]),
        ('I add.<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>', "I add.", [ADD]),
        ('<tool_call>{"name":"add","parameters":{"a":2,"b":3}}', "", [ADD]),
        ('<tool_call>{"name":"add","arguments":"{\\"a\\":2,\\"b\\":3}"}</tool_call>', "", [ADD]),
        (2 * '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>\n', "", [ADD, ADD]),
        (2 * '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}', "", [ADD, ADD]),
        ('<tool_call>{"name":"now"}</tool_call>', "", [WrittenCall("now", {}, "")]),
        ('{"name":"add","arguments":{"a":2,"b":3}}', '{"name":"add","arguments":{"a":2,"b":3}}', []),
        ("5", "5", []),
    ],
)
def test_calls_between_tags_are_found_wherever_they_stand(text: str, content: str, calls: list[WrittenCall]) -> None:
    assert parse_reply(text, "hermes") == (content, calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 2, "b": 3}}', [ADD]),
        ('\n<|python_tag|>{"name": "add", "arguments": {"a": 2, "b": 3}} ', [ADD]),
        ('```json\n{"name": "add", "parameters": {"a": 2, "b": 3}}\n```', [ADD]),
        ('[{"name":"add","parameters":{"a":2,"b":3}},{"name":"now"}]', [ADD, WrittenCall("now", {}, "")]),
        ('{"name":"add","parameters":{"a":2,"b":3}}; {"name":"now"}', [ADD, WrittenCall("now", {}, "")]),
        ('{"name":"add","parameters":{"a":2,"b":3}}\n{"name":"now"}', [ADD, WrittenCall("now", {}, "")]),
    ],
)
def test_calls_that_are_the_whole_text_are_found(text: str, calls: list[WrittenCall]) -> None:
    assert parse_reply(text, "json") == ("", calls)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
JSON_CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'


@pytest.mark.parametrize(
    ("tool_format", "is_thinking", "text", "content"),
    [
        ("hermes", False, f"<think>I could {CALL}</think>5", None),
        ("hermes", False, f"<think>I could {CALL}", None),
        ("hermes", False, f"Well. <think>{CALL}</think> 5", None),
        ("hermes", True, f"I could {CALL}</think>5", None),
        ("hermes", True, f"I could {CALL}", None),
        ("hermes", False, f"<think>No {CALL}.</think>\n\n{CALL}", f"<think>No {CALL}.</think>"),
        ("hermes", True, f"No {CALL}.</think>So.\n{CALL}", f"No {CALL}.</think>So."),
        ("hermes", False, f"{CALL}<think>{CALL}</think>", f"<think>{CALL}</think>"),
        ("hermes", False, f"I </think> {CALL}", "I </think>"),
        ("xml", False, f"<think>{CALL}</think>5", None),
        ("json", False, f"<think>{JSON_CALL}</think>", None),
        ("json", True, JSON_CALL, None),
        ("json", False, f"<think>Hm.</think>\n{JSON_CALL}", "<think>Hm.</think>"),
        ("json", True, f"Hm.</think>\n{JSON_CALL}", "Hm.</think>"),
    ],
)
def test_call_that_is_only_thought_about_is_none(
    tool_format: ToolFormat, is_thinking: bool, text: str, content: str | None
) -> None:
    calls = [] if content is None else [ADD]
    assert parse_reply(text, tool_format, is_thinking=is_thinking) == (text if content is None else content, calls)


def xml(*parameters: str, name: str = "find") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


async def find(
    words: str, most: int = 3, exact: bool = False, places: list[int] | None = None, near: str | None = None
) -> None:
    """Find words."""


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (parameter("words", "5"), {"words": "5"}),
        (parameter("words", "<a>\n  b\n</a>"), {"words": "<a>\n  b\n</a>"}),
        (parameter("words", "null") + parameter("near", "null"), {"words": "null", "near": None}),
        (
            parameter("most", "7") + parameter("exact", "True") + parameter("places", "[1, 2]"),
            {"most": 7, "exact": True, "places": [1, 2]},
        ),
        (parameter("most", "seven"), {"most": "seven"}),
        (parameter("other", "7"), {"other": "7"}),
        ("<parameter=words>a<parameter=most>7", {"words": "a", "most": 7}),
        ("", {}),
    ],
)
def test_call_in_xml_has_values_of_the_types_that_the_schema_says(written: str, arguments: dict[str, Any]) -> None:
    tools = [describe_tool(find).schema]

    assert parse_reply(f"I look.\n{xml(written)}", "xml", tools) == ("I look.", [WrittenCall("find", arguments, "")])


@pytest.mark.parametrize(
    ("text", "name", "fault"),
    [
        (CALL, "", "not a whole call"),
        ("<tool_call><function=find><parameter=words>rm -r /tm", "", "not a whole call"),
        (xml("words: a"), "find", "the arguments of 'find' are not all parameters"),
    ],
)
def test_call_that_is_not_written_as_the_xml_template_teaches_is_a_fault(text: str, name: str, fault: str) -> None:
    (call,) = parse_reply(text, "xml").calls

    assert (call.name, call.arguments) == (name, {})
    assert call.error.startswith(fault)


@pytest.mark.parametrize("text", ["5", "", "{1, 2}", '{"answer": 5}', 'Say {"name": "add"}', "[1, 2]"])
def test_text_that_calls_nothing_stays_a_text(text: str) -> None:
    assert parse_reply(text, "json") == (text, [])


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize(
    ("body", "name", "fault"),
    [
        ('{"name": "add", "arguments": {"a": 2', "", "not valid JSON"),
        ('{"name": "add", "arguments": [2, 3]}', "add", "the arguments of 'add' are no object"),
        ('{"name": "add", "arguments": "2, 3"}', "add", "the arguments of 'add' are no object"),
        ('{"name": 5, "arguments": {}}', "", "a call without a name"),
        ('{"name": "add", "arguments": {"a": 1e400}}', "", "not valid JSON"),
        ('{"name": ' + "[" * 5000, "", "not valid JSON"),
    ],
)
def test_call_with_a_fault_says_which(tool_format: ToolFormat, body: str, name: str, fault: str) -> None:
    text = f"<tool_call>{body}</tool_call>" if tool_format == "hermes" else body

    (call,) = parse_reply(text, tool_format).calls

    assert call.name == name
    assert call.error.startswith(fault)
    assert call.error.endswith('need {"name": ..., "arguments": {...}}')


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def deepseek(*calls: str, between: str = "") -> str:
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


ARGUMENTS = '{"a": 2, "b": 3}'
KIMI_ADD = f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
KIMI_NOW = "<|tool_call_begin|>functions.now:1 <|tool_call_argument_begin|> {} <|tool_call_end|>"
DEEPSEEK_ADD = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
FENCED_ADD = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
FENCED_NOW = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
NOW = WrittenCall("now", {}, "")


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("kimi", kimi(KIMI_ADD), "", [ADD._replace(id="functions.add:0")]),
        ("kimi", f"I add.{kimi(KIMI_ADD, KIMI_NOW)}", "I add.", [
            ADD._replace(id="functions.add:0"), NOW._replace(id="functions.now:1")]),
        ("kimi", KIMI_ADD, "", [ADD._replace(id="functions.add:0")]),
        ("kimi", f"<think>{kimi(KIMI_ADD)}</think>5", f"<think>{kimi(KIMI_ADD)}</think>5", []),
        ("kimi", f"<think>Hm.</think>{kimi(KIMI_ADD)}", "<think>Hm.</think>", [ADD._replace(id="functions.add:0")]),
        ("kimi", kimi(), kimi(), []),
        ("deepseek", f"I add.{deepseek(DEEPSEEK_ADD, DEEPSEEK_ADD)}", "I add.", [ADD, ADD]),
        ("deepseek", f"Hm.</think>{deepseek(DEEPSEEK_ADD)}", "Hm.</think>", [ADD]),
        ("deepseek", deepseek("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"\\n```\"}<｜tool▁call▁end｜>"), "", [
            WrittenCall("f", {"a": "\n```"}, "")]),
        ("deepseek_fenced", deepseek(FENCED_ADD, FENCED_NOW, between="\n"), "", [ADD, NOW]),
        ("deepseek", deepseek(FENCED_ADD), "", [ADD]),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>", "", [ADD]),
        ("harmony", f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}", "", [ADD]),
        ("harmony", f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.add<|message|>{ARGUMENTS}<|call|>", "I add.", [ADD]),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>",
            "5", []),
        ("harmony", "<|channel|>analysis<|message|>Hm", "", []),
        ("harmony", "<|channel|>final<|message|>Five", "Five", []),
        ("harmony", "5", "5", []),
    ],
)  # fmt: skip
def test_calls_between_special_tokens_are_found(
    tool_format: ToolFormat, text: str, content: str, calls: list[WrittenCall]
) -> None:
    parsed = parse_reply(text, tool_format, is_thinking=text.startswith("Hm."))

    assert parsed == (content, calls)


@pytest.mark.parametrize(
    ("tool_format", "text", "name", "fault"),
    [
        ("kimi", kimi(KIMI_ADD.replace("functions.add:0", "add")), "", "not a whole call"),
        ("kimi", "<|tool_call_begin|>functions.add:0", "", "not a whole call"),
        ("kimi", kimi(KIMI_ADD.replace("3}", "3")), "add", "the arguments of 'add' are no object"),
        ("deepseek", deepseek("<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"), "", "not a whole call"),
        ("deepseek", deepseek(DEEPSEEK_ADD.replace(ARGUMENTS, "[2]")), "add", "the arguments of 'add' are no object"),
        ("deepseek_fenced", deepseek(FENCED_ADD.replace("3}", "")), "add", "the arguments of 'add' are no object"),
        (
            "harmony",
            "<|channel|>commentary to=functions.add<|message|>{",
            "add",
            "the arguments of 'add' are no object",
        ),
        ("harmony", "<|channel|>analysis to=python code<|message|>1", "python", "there is no 'python' to call"),
    ],
)
def test_a_call_between_special_tokens_that_is_none_is_a_fault_that_the_model_is_told(
    tool_format: ToolFormat, text: str, name: str, fault: str
) -> None:
    (call,) = parse_reply(text, tool_format).calls

    assert call.name == name
    assert call.error.startswith(fault)


@pytest.mark.parametrize("tool_format", ["kimi", "deepseek", "deepseek_fenced", "harmony"])
@pytest.mark.parametrize("unit", [piece for piece in PIECES if piece.startswith("<")] + [" ", "\n", "a", "`"])
def test_a_long_reply_of_one_mark_is_read_in_one_pass(tool_format: ToolFormat, unit: str) -> None:
    """Reading that looked ahead from each mark would take its deadline."""
    parse_reply(unit * 20_000, tool_format)


@given(
    st.text() | st.lists(st.sampled_from(PIECES)).map("".join),
    st.sampled_from(get_args(ToolFormat)),
)
def test_whatever_is_written_ends_in_calls_or_text(text: str, tool_format: ToolFormat) -> None:
    parsed = parse_reply(text, tool_format)

    assert parsed.content == text or parsed.calls or tool_format == "harmony"
    assert all(call.error or call.name or call.arguments == {} for call in parsed.calls)


def test_format_is_the_one_that_the_template_teaches() -> None:
    assert guess_format("... <tool_call> ...") == "hermes"
    assert guess_format("<tool_call><function=example><parameter=one>") == "xml"
    assert guess_format("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'") == "deepseek"
    assert guess_format("'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json'") == "deepseek_fenced"
    assert guess_format("<|tool_calls_section_begin|><|tool_call_begin|>") == "kimi"
    assert guess_format("<|start|>assistant<|channel|>final<|message|>") == "harmony"
    for other in ("<tool_call>{name}<arg_key>", "[TOOL_CALLS]", "<invoke name=", "<function=name>{json}"):
        assert guess_format(other) == "unknown", other
    assert guess_format("{{ message.content }}") == "json"


# What the model is told


class Unit(Enum):
    CM = "cm"
    INCH = "inch"


@dataclass
class Point:
    x: int
    y: int = 0


def measure(
    length: float, unit: Unit = Unit.CM, *, digits: Literal[0, 1] = 0, points: list[Point] | None = None
) -> str:
    """Measure a length.

    Twice, to be sure.

    Args:
        length: how long it is,
            about.
        unit (Unit): what it is written in.

    Returns:
        Text.
    """
    return f"{length:.{digits}f} {unit.value} {points}"


def test_schema_is_read_off_signature_and_docstring() -> None:
    schema = describe_tool(measure).schema

    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("measure", "Measure a length.\n\nTwice, to be sure.")
    parameters = function["parameters"]
    assert parameters["type"] == "object"
    assert parameters["required"] == ["length"]
    assert parameters["additionalProperties"] is False
    length = parameters["properties"]["length"]
    assert length == {"description": "how long it is, about.", "type": "number"}
    assert parameters["properties"]["unit"]["description"] == "what it is written in."
    assert parameters["properties"]["digits"]["enum"] == [0, 1]
    assert set(parameters["$defs"]) == {"Point", "Unit"}
    json.dumps(schema)


def test_parameters_are_described_as_sphinx_writes_them_too() -> None:
    text = "Add.\n\n:param int a: the first\n:param b: the second,\n    in full\n:returns: the sum"

    assert read_docstring(text) == ("Add.", {"a": "the first", "b": "the second, in full"})


def test_function_without_parameters_or_docstring_is_a_tool() -> None:
    def now() -> str:
        return "noon"

    assert describe_tool(now).schema["function"]["parameters"] == {
        "type": "object", "properties": {}, "required": [], "additionalProperties": False,
    }  # fmt: skip


def test_method_and_annotated_parameter_are_described() -> None:
    class Game:
        def move(self, to: Annotated[int, msgspec.Meta(ge=0, le=8)]) -> None:
            """Move."""

    properties = describe_tool(Game().move).schema["function"]["parameters"]["properties"]

    assert properties == {"to": {"type": "integer", "minimum": 0, "maximum": 8}}


def test_a_tool_is_read_once_however_many_trajectories_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(reading, "read_docstring", lambda text: read.append(text) or read_docstring(text))

    class Game:
        def move(self, to: int) -> int:
            """Move."""
            return to

    def look(at: int) -> int:
        """Look."""
        return at

    games = [Game() for _ in range(3)]
    moves = [describe_tool(game.move) for game in games]
    looks = [describe_tool(look) for _ in range(3)]

    assert read == ["Move.", "Look."]
    assert [move.function.__self__ for move in moves] == games  # type: ignore[attr-defined]
    assert looks[2].schema == looks[0].schema
    assert looks[2].check({"at": 3}) == {"at": 3}


def test_a_tool_is_read_again_where_it_has_changed_and_kept_by_nobody() -> None:
    def look(at: int) -> int:
        """Look."""
        return at

    before = describe_tool(look).schema["function"]
    look.__doc__, look.__annotations__["at"] = "Look again.", float
    after = describe_tool(look).schema["function"]
    kept = weakref.ref(look)
    del look

    assert (before["description"], after["description"]) == ("Look.", "Look again.")
    assert after["parameters"]["properties"]["at"]["type"] == "number"
    assert kept() is None


def test_a_tool_is_read_again_where_a_default_has_changed() -> None:
    def look(at: int, times: int = 1) -> int:
        """Look."""
        return at * times

    before = describe_tool(look).schema["function"]["parameters"]
    look.__defaults__ = None
    after = describe_tool(look).schema["function"]["parameters"]

    assert (before["required"], after["required"]) == (["at"], ["at", "times"])


def tool_that_its_types_know() -> Callable[..., Any]:
    class Move(msgspec.Struct):
        to: int

        def again(self) -> int:
            return move(self)

    def move(one: Move) -> int:
        """Move."""
        return one.to

    return move


def test_a_tool_whose_types_know_it_is_kept_by_nobody() -> None:
    move = tool_that_its_types_know()
    describe_tool(move)
    kept = weakref.ref(move)
    del move
    gc.collect()

    assert kept() is None


def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
def starred(*values: int) -> None: ...
def named(**values: int) -> None: ...
def unwritable(a: complex) -> None: ...
def unknown(a: "Missing") -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (untyped, "tool untyped: parameter 'a' has no type; write one, a: int"),
        (starred, r"tool starred: got parameter '\*values"),
        (named, r"tool named: got parameter '\*\*values"),
        (unwritable, "tool unwritable: a parameter's type does not fit into JSON: .*complex"),
        (unknown, "tool unknown: cannot read its signature: .*Missing"),
        (lambda: 1, "need a function with a name"),
        (partial(print), "need a function with a name"),
        (5, "need a function with a name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_what_to_do(function: Any, reason: str) -> None:
    with pytest.raises(WorkflowError, match=reason):
        describe_tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(WorkflowError, match="need different names"):
        Toolbox([measure, measure], timeout_s=1)


# What comes of a call


def call_of(name: str, error: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(id="call00001", name=name, arguments=arguments, error=error)


async def come_of(*functions: Callable[..., Any], call: ToolCall, timeout_s: float = 5.0) -> ToolResult:
    (result,) = await Toolbox(functions, timeout_s=timeout_s).run([call])
    return result


def add(a: int, b: int = 1) -> int:
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    await anyio.lowlevel.checkpoint()
    return a + b


@pytest.mark.parametrize("function", [add, add_async, measure])
async def test_result_is_told_as_text(function: Callable[..., Any]) -> None:
    arguments = {"length": 2, "unit": "inch", "points": [{"x": 1}]} if function is measure else {"a": "2", "b": 3}

    result = await come_of(function, call=call_of(function.__name__, **arguments))

    text = "2 inch [Point(x=1, y=0)]" if function is measure else "5"
    assert (result.text, result.is_error) == (text, False)
    name = function.__name__
    assert result.message == {"role": "tool", "tool_call_id": "call00001", "name": name, "content": text}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (call_of("add", a="two"), "error: add: Expected `int`, got `str` - at `$.a`"),
        (call_of("add"), "error: add: Object missing required field `a`"),
        (call_of("add", a=1, c=2), "error: add: Object contains unknown field `c`"),
        (call_of("sub", a=1), "error: there is no tool 'sub', only add"),
        (call_of("", error="not valid JSON"), "error: not valid JSON"),
    ],
)
async def test_call_that_does_not_fit_is_told_so_and_nothing_runs(call: ToolCall, text: str) -> None:
    result = await come_of(add, call=call)

    assert (result.text, result.is_error) == (text, True)


def divide(a: int) -> float:
    return 1 / a


async def divide_async(a: int) -> float:
    return 1 / a


def leave(a: int) -> None:
    raise SystemExit(a)


def tell(a: int) -> None:
    raise ToolError("try another number")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (divide, "error: divide: ZeroDivisionError: division by zero"),
        (divide_async, "error: divide_async: ZeroDivisionError: division by zero"),
        (leave, "error: leave: called sys.exit(0)"),
        (tell, "error: try another number"),
    ],
)
async def test_what_a_tool_raises_is_told(function: Callable[..., Any], text: str) -> None:
    assert (await come_of(function, call=call_of(function.__name__, a=0))).text == text


@pytest.mark.parametrize("error", [Reject("why"), GenerationError("gone"), WorkflowError("mine")])
async def test_errors_of_ours_are_not_for_the_model(error: Exception) -> None:
    def give_up() -> None:
        raise error

    with pytest.raises(type(error)):
        await come_of(give_up, call=call_of("give_up"))


async def test_tool_past_its_deadline_is_told_so_and_its_thread_left_behind() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    result = await come_of(hang, call=call_of("hang"), timeout_s=0.05)

    assert (result.text, result.is_error) == ("error: hang: no answer within 0.05 s", True)
    assert len(running._left_behind) == 1
    release.set()
    (thread,) = (one for one in threading.enumerate() if one.name == "tool hang")
    await anyio.to_thread.run_sync(thread.join, 5)
    assert not running._left_behind


async def test_async_tool_past_its_deadline_is_cancelled() -> None:
    seen = []

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            seen.append("cancelled")

    assert (await come_of(hang, call=call_of("hang"), timeout_s=0.05)).text == "error: hang: no answer within 0.05 s"
    assert seen == ["cancelled"]


async def test_deadline_of_its_own_goes_before_the_one_of_all() -> None:
    @tool(timeout_s=0.05)
    async def hang() -> None:
        await anyio.sleep_forever()

    assert "within 0.05 s" in (await come_of(hang, call=call_of("hang"), timeout_s=60)).text


async def test_threads_that_never_come_back_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LEFT_BEHIND", 1)
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    await come_of(hang, call=call_of("hang"), timeout_s=0.05)
    try:
        with pytest.raises(WorkflowError, match="tool hang: 1 threads of earlier calls never came back"):
            await come_of(hang, call=call_of("hang"), timeout_s=0.05)
    finally:
        release.set()
        await until(lambda: not running._left_behind)  # the next test is not to find it


async def test_plain_tools_of_many_trajectories_run_side_by_side() -> None:
    together = threading.Barrier(8)

    def meet() -> str:
        together.wait(10)
        return "met"

    results: list[ToolResult] = []

    async def call() -> None:
        results.append(await come_of(meet, call=call_of("meet"), timeout_s=20))

    async with anyio.create_task_group() as trajectories:
        for _ in range(8):
            trajectories.start_soon(call)

    assert [result.text for result in results] == ["met"] * 8


async def test_calls_of_one_reply_run_in_their_order_and_only_so_many() -> None:
    order: list[int] = []

    def note(number: int) -> None:
        order.append(number)

    calls = [call_of("note", number=number) for number in range(MAX_CALLS_PER_REPLY + 1)]
    results = await Toolbox([note], timeout_s=5).run(calls)

    assert order == list(range(MAX_CALLS_PER_REPLY))
    assert [result.is_error for result in results] == [False] * MAX_CALLS_PER_REPLY + [True]


async def test_flood_of_text_is_cut() -> None:
    def flood() -> str:
        return "x" * (MAX_OUTPUT_CHARACTERS + 5)

    text = (await come_of(flood, call=call_of("flood"))).text

    assert text == "x" * MAX_OUTPUT_CHARACTERS + "\n[5 characters more]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (True, "true"),
        ({"a": [1, 2.5]}, '{"a":[1,2.5]}'),
        (Point(1), '{"x":1,"y":0}'),
        (1 + 2j, '"(1+2j)"'),
        ({"1": object}, '{"1":"<class \'object\'>"}'),
        ([[1], {2}], "[[1],[2]]"),
    ],
)
def test_whatever_a_tool_returns_has_a_text(value: Any, text: str) -> None:
    assert as_text(value) == text
