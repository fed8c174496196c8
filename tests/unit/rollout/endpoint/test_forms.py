"""A grammar leaves of all answers those that were asked for, in the model's own way, and the parser finds their calls.

The grammars are compiled by XGrammar, as both engines do it, for a vocabulary of bytes.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import xgrammar

from areal_async.rollout.endpoint.calls import CompletionRequest, Form, ToolChoice
from areal_async.rollout.endpoint.forms import grammar_of
from areal_async.rollout.endpoint.refusals import Refusal
from areal_async.rollout.tools.parse import ToolFormat, parse_reply

END = 256
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}},
            "required": ["a"],
            "$defs": {"b": {"enum": ["x", "y"]}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}}
COLOUR = Form("json_schema", {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]})
RED = '{"colour": "red"}'
CALLS: dict[ToolFormat, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "xml": (
        "<tool_call>\n<function=add>\n<parameter=a>2</parameter><parameter=b>x</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n\n</function>\n</tool_call>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 2, "b": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 2, "b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_fenced": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "json": ('{"name": "add", "parameters": {"a": 2, "b": "x"}}', '{"name": "now", "parameters": {}}'),
}


def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(END)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, cache_enabled=False)


def accepted(grammar: dict[str, Any], texts: Sequence[str]) -> list[str]:
    """Return those of the texts which the grammar takes as whole answers."""
    ((kind, value),) = grammar.items()
    text = value if isinstance(value, str) else json.dumps(value)
    compiled = {
        "json_schema": compiler().compile_json_schema,
        "regex": compiler().compile_regex,
        "ebnf": compiler().compile_grammar,
        "structural_tag": compiler().compile_structural_tag,
    }[kind](text)
    taken = []
    for one in texts:
        matcher = xgrammar.GrammarMatcher(compiled)
        if all(matcher.accept_token(token) for token in [*one.encode(), END]):
            taken.append(one)
    return taken


def together(tool_format: ToolFormat, first: str, second: str) -> str:
    """Two calls in one reply."""
    match tool_format:
        case "kimi":
            end, begin, between = "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>", ""
        case "deepseek":
            end, begin, between = "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>", ""
        case "deepseek_fenced":
            end, begin, between = "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>", "\n"
        case _:
            end, begin, between = "", "", "\n"
    return first.removesuffix(end) + between + second.removeprefix(begin)


def call_with(form: Form | None = None, **choice: Any) -> CompletionRequest:
    return CompletionRequest(messages=[], tools=[ADD, NOW], choice=ToolChoice(**choice), form=form)


@pytest.mark.parametrize("tool_format", CALLS)
def test_answers_are_of_the_calls_that_were_asked_for(tool_format: ToolFormat) -> None:
    add, now = CALLS[tool_format]
    bad = add.replace("2", "two")
    strange = add.replace("add", "sub")
    both, said = together(tool_format, add, now), f"I add.\n{add}"
    texts = [add, now, both, said, bad, strange, RED, "", "I add.", "é [1]", f"[{add}]"]
    is_tagged = tool_format != "json"
    several = [both] if is_tagged else []
    free = [said, "", "I add.", "é [1]", *([RED] if is_tagged else [])]
    called = {add: ["add"], now: ["now"], both: ["add", "now"], said: ["add"] if is_tagged else []}

    for call, wanted in (
        (call_with(is_required=True), [add, now, *several]),
        (call_with(is_required=True, is_single=True), [add, now]),
        (call_with(is_required=True, names=("now",), is_single=True), [now]),
        (call_with(COLOUR), [add, now, *several, RED]),
        (call_with(COLOUR, is_single=True), [add, now, RED]),
        (call_with(is_single=True), [add, now, *free]),
    ):
        taken = accepted(grammar_of(call, tool_format, is_thinking=False), texts)
        assert sorted(taken) == sorted(wanted), call.choice
        for text in taken:
            calls = parse_reply(text, tool_format, [ADD, NOW]).calls
            assert [one.name for one in calls] == called.get(text, []), text
            assert not any(one.error for one in calls)
            assert all(one.arguments == {"a": 2, "b": "x"} for one in calls if one.name == "add")


HARMONY_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": "x"}'
ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"


def test_call_or_form_stands_in_a_channel_of_its_own_after_the_thought_in_another() -> None:
    red = f"<|channel|>final<|message|>{RED}"
    texts = [HARMONY_ADD, ANALYSIS + HARMONY_ADD, red, ANALYSIS + red, RED, ANALYSIS, HARMONY_ADD + HARMONY_ADD]
    texts.append(HARMONY_ADD.replace("2", "two"))

    for call, wanted in (
        (call_with(is_required=True), texts[:2]),
        (call_with(COLOUR), texts[:4]),
        (CompletionRequest(messages=[], form=COLOUR), texts[2:4]),
    ):
        assert accepted(grammar_of(call, "harmony", is_thinking=False), texts) == wanted
    assert grammar_of(call_with(is_single=True), "harmony", is_thinking=False) == {}
    assert parse_reply(ANALYSIS + HARMONY_ADD, "harmony").calls[0].arguments == {"a": 2, "b": "x"}
    assert parse_reply(ANALYSIS + red, "harmony") == (RED, [])


def test_answer_may_be_anything_where_nothing_is_asked_of_it() -> None:
    for call in (
        call_with(),
        CompletionRequest(messages=[]),
        CompletionRequest(messages=[], choice=ToolChoice(is_single=True)),
    ):
        assert grammar_of(call, "hermes", is_thinking=False) == {}


def test_answer_without_tools_has_the_form_that_was_asked_for() -> None:
    for form, text in (
        (COLOUR, RED),
        (Form("regex", "a+"), "aa"),
        (Form("ebnf", 'root ::= "b"'), "b"),
        (Form("structural_tag", {"type": "structural_tag", "format": {"type": "const_string", "value": "c"}}), "c"),
    ):
        texts = [RED, "aa", "b", "c", ""]
        own = [text]
        assert accepted(grammar_of(CompletionRequest(messages=[], form=form), None, is_thinking=False), texts) == own
        thought = [f"hm</think>\n\n{one}" for one in texts]
        after = accepted(grammar_of(CompletionRequest(messages=[], form=form), None, is_thinking=True), texts + thought)
        assert after == [f"hm</think>\n\n{text}"]
        beside = grammar_of(call_with(form), "hermes", is_thinking=False)
        assert accepted(beside, texts) == own


def test_call_comes_after_the_thought_that_the_template_has_begun() -> None:
    add, _ = CALLS["hermes"]
    grammar = grammar_of(call_with(is_required=True), "hermes", is_thinking=True)

    assert accepted(grammar, [add, f"hm</think>\n\n{add}", "hm"]) == [f"hm</think>\n\n{add}"]


def test_call_cannot_be_asked_for_where_the_servers_parser_alone_knows_its_form() -> None:
    for choice in (ToolChoice(is_required=True), ToolChoice(is_single=True)):
        with pytest.raises(Refusal, match="tool_call_parser") as caught:
            grammar_of(CompletionRequest(messages=[], tools=[ADD], choice=choice), None, is_thinking=False)
        assert caught.value.param == "tool_choice"
