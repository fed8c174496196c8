"""The grammar of an answer: which calls it may have, in the model's own way of writing them, and what else. Pure.

Formats are XGrammar's structural tags. What an answer says beside its calls is not touched where it may say anything.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal_async.rollout.endpoint.calls import CompletionRequest, Form
from areal_async.rollout.endpoint.refusals import Refusal
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
    if not call.tools or (form is None and not choice.is_required and not choice.is_single):
        if form is None or not is_thinking:
            return {} if form is None else {form.kind: form.value}
        return _tag(_format_of(form), is_thinking=True)
    if tool_format not in _WRITERS:
        raise Refusal(
            "bad_request",
            "tool_choice: cannot be had, as how this model writes calls is known to the servers' parser "
            "(inference.tool_call_parser) alone; leave it to the model",
            param="tool_choice",
            code="unsupported_parameter",
        )
    callable_tools = [tool for tool in call.tools if not choice.names or tool["function"]["name"] in choice.names]
    tags = [_WRITERS[tool_format](tool["function"]) for tool in callable_tools]
    calls = _calls(tags, is_single=choice.is_single or tool_format == "json")
    if choice.is_required:
        return _tag(calls, is_thinking=is_thinking)
    if form is not None:
        return _tag(_any_of([_format_of(form), calls]), is_thinking=is_thinking)
    if tool_format == "json":
        return _tag(_any_of([calls, {"type": "regex", "pattern": _NO_CALL}]), is_thinking=is_thinking)
    text = {"type": "triggered_tags", "triggers": [OPEN_TAG], "tags": tags, "stop_after_first": True}
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


_WRITERS = {"hermes": _hermes_call, "xml": _xml_call, "json": _json_call}


def _arguments(function: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": {"type": "object", **function["parameters"]}}


def _calls(tags: Sequence[Format], *, is_single: bool) -> Format:
    if is_single:
        return _any_of(tags)
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}


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
