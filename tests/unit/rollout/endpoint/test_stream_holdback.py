"""What is told of a growing text stays true, whatever pieces it comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.endpoint.stream_holdback import StreamHoldback
from areal_async.rollout.tools.parse import ToolFormat, parse_reply

PARTS = [
    "a",
    " ",
    "\n",
    "<",
    "<tool",
    "<tool_call>",
    '{"name":"f","arguments":{}}',
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=f>",
    "</function>",
    "```",
    "[",
    "STOP",
    "ST",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
    "<｜tool▁call▁end｜>",
]
FORMATS: list[ToolFormat] = ["hermes", "xml", "json", "kimi", "deepseek", "deepseek_fenced"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from([None, *FORMATS]))
def test_what_is_told_and_the_rest_are_the_content(
    text: str, places: list[int], tool_format: ToolFormat | None
) -> None:
    parsed = parse_reply(text, tool_format) if tool_format else None
    content = parsed.content if parsed and parsed.calls and not any(call.error for call in parsed.calls) else text
    holdback = StreamHoldback(tool_format=tool_format, stop=())

    told = "".join(holdback.push(piece) for piece in cut(text, places))

    assert (told + holdback.rest(content)).strip() == content.strip()
    if content == text:
        assert told + holdback.rest(content) == content


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8))
def test_no_part_of_a_stop_string_is_told(text: str, places: list[int]) -> None:
    text = text.partition("STOP")[0] + "STOP"
    content = text.removesuffix("STOP")
    holdback = StreamHoldback(tool_format=None, stop=("STOP",))

    told = "".join(holdback.push(piece) for piece in cut(text, places))

    assert told + holdback.rest(content) == content


@pytest.mark.parametrize(
    ("tool_format", "pieces", "told"),
    [
        (None, ["Hi <tool", "_call>", " x"], ["Hi <tool", "_call>", " x"]),
        ("hermes", ["Hi ", "<tool", "_call>{", "}"], ["Hi", "", "", ""]),
        ("hermes", ["1 <", " 2", ". So"], ["1", " < 2", ". So"]),
        ("json", ["\n", "{", '"a"'], ["", "", ""]),
        ("json", ["`", "x`", " {"], ["", "`x`", " {"]),
    ],
)
def test_text_is_told_as_soon_as_it_can_be_no_call(
    tool_format: ToolFormat | None, pieces: list[str], told: list[str]
) -> None:
    holdback = StreamHoldback(tool_format=tool_format, stop=())

    assert [holdback.push(piece) for piece in pieces] == told


def test_nothing_is_told_early_where_tags_cannot_be_seen() -> None:
    holdback = StreamHoldback(tool_format="hermes", stop=(), holds_all=True)

    assert holdback.push("Hi") == ""
    assert holdback.rest("Hi") == "Hi"
