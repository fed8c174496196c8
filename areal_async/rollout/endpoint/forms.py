"""The grammar of an answer: which calls it may have, in the model's own way of writing them, and what else. Pure.

Formats are XGrammar's structural tags. What an answer says beside its calls is not touched where it may say anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_async.rollout.endpoint.calls import CompletionRequest, Form
from areal_async.rollout.endpoint.refusals import Refusal
from areal_async.rollout.tools import marked_calls as marks
from areal_async.rollout.tools.parse import CLOSE_TAG, OPEN_TAG, THOUGHT_TAG

Format = dict[str, Any]
_NO_CALL = r"([^\s\[{`<][\s\S]*)?"
"""A text that is not read as a call where calls are JSON."""
_THOUGHT: Format = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{THOUGHT_TAG}\n\n"}


def grammar_of(call: CompletionRequest, tool_format: str | None, *, is_thinking: bool) -> dict[str, Any]:
    """Return the grammar of the answer to a call, as ``policy.chat`` takes it; empty where it may say anything.

    Args:
        tool_format: how the model writes calls; ``None`` where only the servers' parser knows.
        is_thinking: the prompt ends within a thought, which the answer has to end before it is of the grammar.

    Raises:
        Refusal: the model's way of writing calls is not known here.
    """
    form, choice = call.form, call.choice
    has_channels = tool_format == "harmony"
    if not call.tools or (form is None and not choice.is_required and not choice.is_single):
        if form is None or not (is_thinking or has_channels):
            return {} if form is None else {form.kind: form.value}
        return _tag(_in_channel(form) if has_channels else _format_of(form), is_thinking=is_thinking)
    if tool_format is None or tool_format not in _WAYS:
        raise Refusal(
            "bad_request",
            "tool_choice: cannot be had, as how this model writes calls is known to the servers' parser "
            "(inference.tool_call_parser) alone; leave it to the model",
            param="tool_choice",
            code="unsupported_parameter",
        )
    callable_tools = [tool for tool in call.tools if not choice.names or tool["function"]["name"] in choice.names]
    way = _WAYS[tool_format]
    tags = [way.write(tool["function"]) for tool in callable_tools]
    singles = [{**tag, "begin": way.opening + tag["begin"], "end": tag["end"] + way.closing} for tag in tags]
    is_single = choice.is_single or way.separator is None
    calls = _any_of(singles) if is_single else _several(tags, way)
    if has_channels:
        calls = _after_analysis(calls)
    if choice.is_required:
        return _tag(calls, is_thinking=is_thinking)
    if form is not None:
        answer = _in_channel(form) if has_channels else _format_of(form)
        return _tag(_any_of([answer, calls]), is_thinking=is_thinking)
    if has_channels:
        return {}  # a call ends the answer there in any case
    if tool_format == "json":
        return _tag(_any_of([calls, {"type": "regex", "pattern": _NO_CALL}]), is_thinking=is_thinking)
    trigger = way.opening or OPEN_TAG
    text = {"type": "triggered_tags", "triggers": [trigger], "tags": singles, "stop_after_first": True}
    return _tag(text, is_thinking=is_thinking)


def _hermes_call(function: Mapping[str, Any]) -> Format:
    begin = f'{OPEN_TAG}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    return {"type": "tag", "begin": begin, "content": _arguments(function), "end": f"}}\n{CLOSE_TAG}"}


def _xml_call(function: Mapping[str, Any]) -> Format:
    begin = f"{OPEN_TAG}\n<function={function['name']}>\n"
    content = {**_arguments(function), "style": "qwen_xml"}
    return {"type": "tag", "begin": begin, "content": content, "end": f"\n</function>\n{CLOSE_TAG}"}


def _json_call(function: Mapping[str, Any]) -> Format:
    begin = f'{{"name": {json.dumps(function["name"])}, "parameters": '
    return {"type": "tag", "begin": begin, "content": _arguments(function), "end": "}"}


def _kimi_call(function: Mapping[str, Any]) -> Format:
    begin = f"{marks.KIMI_CALL}{marks.FUNCTIONS}{function['name']}:"
    number: Format = {"type": "regex", "pattern": "[0-9]{1,3}"}
    separator = {"type": "const_string", "value": marks.KIMI_ARGUMENTS}
    content = {"type": "sequence", "elements": [number, separator, _arguments(function)]}
    return {"type": "tag", "begin": begin, "content": content, "end": marks.KIMI_CALL_END}


def _deepseek_call(function: Mapping[str, Any]) -> Format:
    begin = f"{marks.DEEPSEEK_CALL}{function['name']}{marks.DEEPSEEK_SEPARATOR}"
    return {"type": "tag", "begin": begin, "content": _arguments(function), "end": marks.DEEPSEEK_CALL_END}


def _fenced_call(function: Mapping[str, Any]) -> Format:
    begin = f"{marks.DEEPSEEK_CALL}function{marks.DEEPSEEK_SEPARATOR}{function['name']}\n```json\n"
    return {"type": "tag", "begin": begin, "content": _arguments(function), "end": f"\n```{marks.DEEPSEEK_CALL_END}"}


def _harmony_call(function: Mapping[str, Any]) -> Format:
    to = f"{marks.HARMONY_CHANNEL}commentary to={marks.FUNCTIONS}{function['name']}"
    begin = f"{to} <|constrain|>json{marks.HARMONY_MESSAGE}"
    return {"type": "tag", "begin": begin, "content": _arguments(function), "end": ""}  # ended by the end of turn


class _Way(NamedTuple):
    """How calls are written."""

    write: Callable[[Mapping[str, Any]], Format]
    separator: str | None = "\n"
    """Between two; None where a reply has one call."""
    opening: str = ""
    closing: str = ""


_WAYS: Mapping[str, _Way] = {
    "hermes": _Way(_hermes_call),
    "xml": _Way(_xml_call),
    "json": _Way(_json_call, separator=None),
    "kimi": _Way(_kimi_call, "", marks.KIMI_SECTION, marks.KIMI_SECTION_END),
    "deepseek": _Way(_deepseek_call, "", marks.DEEPSEEK_SECTION, marks.DEEPSEEK_SECTION_END),
    "deepseek_fenced": _Way(_fenced_call, "\n", marks.DEEPSEEK_SECTION, marks.DEEPSEEK_SECTION_END),
    "harmony": _Way(_harmony_call, separator=None),
}


def _arguments(function: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": {"type": "object", **function["parameters"]}}


def _several(tags: Sequence[Format], way: _Way) -> Format:
    calls = {"type": "tags_with_separator", "tags": tags, "separator": way.separator, "at_least_one": True}
    if not way.opening:
        return calls
    around = [{"type": "const_string", "value": text} for text in (way.opening, way.closing)]
    return {"type": "sequence", "elements": [around[0], calls, around[1]]}


def _in_channel(form: Form) -> Format:
    final = {"type": "const_string", "value": f"{marks.HARMONY_CHANNEL}final{marks.HARMONY_MESSAGE}"}
    return _after_analysis({"type": "sequence", "elements": [final, _format_of(form)]})


def _after_analysis(content: Format) -> Format:
    """Return what may have a message before it in which the model thinks."""
    analysis = {
        "type": "tag",
        "begin": f"{marks.HARMONY_CHANNEL}analysis{marks.HARMONY_MESSAGE}",
        "content": {"type": "any_text"},
        "end": f"{marks.HARMONY_ENDS[0]}{marks.HARMONY_START}assistant",
    }
    return _any_of([{"type": "sequence", "elements": [analysis, content]}, content])


def _any_of(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _format_of(form: Form) -> Format:
    if form.kind == "structural_tag":
        content: Format = form.value["format"]
        return content
    if form.kind == "ebnf":
        return {"type": "grammar", "grammar": form.value}
    return {"type": form.kind, "pattern" if form.kind == "regex" else "json_schema": form.value}


def _tag(content: Format, *, is_thinking: bool) -> dict[str, Any]:
    if is_thinking:
        content = {"type": "sequence", "elements": [_THOUGHT, content]}
    return {"structural_tag": {"type": "structural_tag", "format": content}}
