"""What the model wrote -> the calls in it. Pure; the model may write anything.

Two ways of writing are known: ``<tool_call>{json}</tool_call>`` anywhere in a text (Hermes, Qwen), and JSON
that is the whole text (Llama): ``{"name": ..., "arguments" or "parameters": {...}}``, or a list of them.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import msgspec

ToolFormat = Literal["hermes", "json"]

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
_HERMES_CALL = re.compile(f"{OPEN_TAG}(.*?)(?:{CLOSE_TAG}|(?={OPEN_TAG})|\\Z)", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_BAD_JSON = (msgspec.DecodeError, RecursionError, UnicodeError)
_SHAPE = 'need {"name": ..., "arguments": {...}}'


class WrittenCall(NamedTuple):
    """One call as it was written."""

    name: str
    arguments: dict[str, Any]
    error: str
    """What is wrong with it, in words for the model; empty when nothing is."""


class Parsed(NamedTuple):
    """A reply, taken apart."""

    content: str
    """What is no call."""
    calls: list[WrittenCall]


def parse_reply(text: str, tool_format: ToolFormat) -> Parsed:
    """Find the calls in what the model wrote, in their order."""
    return _PARSERS[tool_format](text)


def guess_format(template: str) -> ToolFormat:
    """Return the way of writing calls that a chat template teaches its model."""
    return "hermes" if OPEN_TAG in template else "json"


def read_found(name: str, parameters: str) -> WrittenCall:
    """Return a call that the serving engine's parser has found; ``parameters`` is JSON, if all is well."""
    return _call_of({"name": name, "arguments": parameters})


def _parse_hermes(text: str) -> Parsed:
    calls = [_read_call(found) for found in _HERMES_CALL.findall(text)]
    return Parsed(_HERMES_CALL.sub("", text).strip() if calls else text, calls)


def _parse_json(text: str) -> Parsed:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    fenced = _FENCE.match(body)
    body = fenced[1].strip() if fenced else body
    if not body.startswith(("{", "[")) or '"name"' not in body:
        return Parsed(text, [])
    try:
        value = msgspec.json.decode(body)
    except _BAD_JSON:
        parts = [part.strip() for part in re.split(r";|\n(?=\s*\{)", body) if part.strip()]
        return Parsed("", [_read_call(part) for part in (parts if len(parts) > 1 and _are_json(parts) else [body])])
    return Parsed("", [_call_of(item) for item in (value if isinstance(value, list) else [value])])


def _are_json(parts: Iterable[str]) -> bool:
    return all(not _read_call(part).error for part in parts)


def _read_call(body: str) -> WrittenCall:
    try:
        return _call_of(msgspec.json.decode(body.strip()))
    except _BAD_JSON as exc:
        return WrittenCall("", {}, f"not valid JSON ({exc}), {_SHAPE}")


def _call_of(value: Any) -> WrittenCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return WrittenCall("", {}, f"a call without a name, {_SHAPE}")
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as it travels between programs
        try:
            arguments = msgspec.json.decode(arguments)
        except _BAD_JSON:
            arguments = None
    if not isinstance(arguments, dict):
        return WrittenCall(name, {}, f"the arguments of {name!r} are no object, {_SHAPE}")
    return WrittenCall(name, arguments, "")


_PARSERS: dict[ToolFormat, Callable[[str], Parsed]] = {"hermes": _parse_hermes, "json": _parse_json}
