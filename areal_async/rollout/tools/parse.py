"""What the model wrote -> the calls in it. Pure; the model may write anything.

These ways of writing are known: ``<tool_call>{json}</tool_call>`` anywhere in a text (Hermes, Qwen), the same tags
around ``<function=NAME><parameter=KEY>value</parameter></function>`` (``xml_calls``), JSON that is the whole text
(Llama): ``{"name": ..., "arguments" or "parameters": {...}}``, or a list of them, and calls between special tokens
(Kimi, DeepSeek, gpt-oss: ``marked_calls``). What stands between ``<think>`` and ``</think>``, or behind a ``<think>``
that was never closed, is thought about and not called.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from areal_async.rollout.tools import marked_calls as marks
from areal_async.rollout.tools.marked_calls import MarkedCall, read_deepseek, read_harmony, read_kimi
from areal_async.rollout.tools.xml_calls import read_xml

ToolFormat = Literal["hermes", "xml", "json", "kimi", "deepseek", "deepseek_fenced", "harmony", "unknown"]
"""``deepseek_fenced`` is V3's and R1's, ``deepseek`` V3.1's."""

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
THINK_TAG, THOUGHT_TAG = "<think>", "</think>"
OPENINGS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": (OPEN_TAG,),
    "xml": (OPEN_TAG,),
    "kimi": (marks.KIMI_SECTION, marks.KIMI_CALL),
    "deepseek": (marks.DEEPSEEK_SECTION, marks.DEEPSEEK_CALL),
    "deepseek_fenced": (marks.DEEPSEEK_SECTION, marks.DEEPSEEK_CALL),
    "harmony": (marks.HARMONY_CHANNEL,),
}
"""Marks that calls may begin with, of each format that has such; the usual one first."""


def _calls_or_thoughts(begin: str, end: str, *around: str) -> re.Pattern[str]:
    """Return a pattern of a thought, of a call, and of marks around calls; a call ends before what is none of it."""
    begin, end, beside = re.escape(begin), re.escape(end), "|".join(map(re.escape, around))
    ends = "|".join(f"(?={mark})" for mark in (begin, *filter(None, [beside])))
    patterns = (f"{THINK_TAG}.*?(?:{THOUGHT_TAG}|\\Z)", f"{begin}(?P<call>.*?)(?:{end}|{ends}|\\Z)", beside)
    return re.compile("|".join(filter(None, patterns)), re.DOTALL)


_TAGGED = _calls_or_thoughts(OPEN_TAG, CLOSE_TAG)
_KIMI = _calls_or_thoughts(marks.KIMI_CALL, marks.KIMI_CALL_END, marks.KIMI_SECTION, marks.KIMI_SECTION_END)
_DEEPSEEK = _calls_or_thoughts(
    marks.DEEPSEEK_CALL, marks.DEEPSEEK_CALL_END, marks.DEEPSEEK_SECTION, marks.DEEPSEEK_SECTION_END
)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_OTHER_FORMATS = ("<arg_key>", "[TOOL_CALLS]", "<invoke name=", "<function=")
"""Marks of templates that teach calls in none of the ways that are known here."""
_BAD_JSON = (msgspec.DecodeError, RecursionError, UnicodeError)
_SHAPE = 'need {"name": ..., "arguments": {...}}'

Schemas = Sequence[Mapping[str, Any]]


class WrittenCall(NamedTuple):
    """One call as it was written."""

    name: str
    arguments: dict[str, Any]
    error: str
    """What is wrong with it, in words for the model; empty when nothing is."""
    id: str = ""
    """What the model calls it by, where its format has that."""


class Parsed(NamedTuple):
    """A reply, taken apart."""

    content: str
    """What is no call."""
    calls: list[WrittenCall]


def parse_reply(text: str, tool_format: ToolFormat, tools: Schemas = (), *, is_thinking: bool = False) -> Parsed:
    """Find the calls in what the model wrote, in their order.

    Args:
        tools: schemas of what may be called, by which values that are written as plain text get their types.
        is_thinking: the prompt ended within a thought.
    """
    if tool_format == "harmony":
        reply = read_harmony(text)
        return Parsed(reply.content, [_read_marked(call) for call in reply.calls])
    thought, said = split_thought(text, is_thinking=is_thinking)
    parsed = _PARSERS[tool_format](said, tools)
    return Parsed((thought + parsed.content).strip(), parsed.calls) if parsed.calls else Parsed(text, [])


def split_thought(text: str, *, is_thinking: bool) -> tuple[str, str]:
    """Part a reply behind the thought that it begins with; all of it is one that was never finished."""
    if not is_thinking and not text.lstrip().startswith(THINK_TAG):
        return "", text
    thought, end, said = text.partition(THOUGHT_TAG)
    return thought + end, said


def is_in_thought(prompt: str) -> bool:
    """Say whether a rendered prompt has the model go on with a thought."""
    return prompt.rstrip().endswith(THINK_TAG)


def guess_format(template: str) -> ToolFormat:
    """Return the way of writing calls that a chat template teaches its model."""
    if "<function=" in template and "<parameter=" in template:
        return "xml"
    if marks.DEEPSEEK_CALL in template:
        return "deepseek_fenced" if "```json" in template else "deepseek"
    if marks.KIMI_CALL in template:
        return "kimi"
    if marks.HARMONY_CHANNEL in template:
        return "harmony"
    if any(mark in template for mark in _OTHER_FORMATS):
        return "unknown"
    return "hermes" if OPEN_TAG in template else "json"


def read_found(name: str, parameters: str) -> WrittenCall:
    """Return a call that the serving engine's parser has found; ``parameters`` is JSON, if all is well."""
    return _call_of({"name": name, "arguments": parameters})


def _parse_tagged(text: str, pattern: re.Pattern[str], read: Callable[[str], WrittenCall]) -> Parsed:
    calls: list[WrittenCall] = []

    def without(found: re.Match[str]) -> str:
        if found["call"] is not None:
            calls.append(read(found["call"]))
        return found[0] if found[0].startswith(THINK_TAG) else ""

    content = pattern.sub(without, text)
    return Parsed(content, calls)


def _read_marked(found: MarkedCall) -> WrittenCall:
    if found.error:
        return WrittenCall(found.name, {}, found.error)
    return _call_of({"name": found.name, "arguments": found.arguments})._replace(id=found.id)


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


_PARSERS: dict[ToolFormat, Callable[[str, Schemas], Parsed]] = {
    "hermes": lambda text, _: _parse_tagged(text, _TAGGED, _read_call),
    "xml": lambda text, tools: _parse_tagged(text, _TAGGED, lambda body: WrittenCall(*read_xml(body, tools))),
    "json": lambda text, _: _parse_json(text),
    "kimi": lambda text, _: _parse_tagged(text, _KIMI, lambda body: _read_marked(read_kimi(body))),
    "deepseek": lambda text, _: _parse_tagged(text, _DEEPSEEK, lambda body: _read_marked(read_deepseek(body))),
    "deepseek_fenced": lambda text, _: _parse_tagged(text, _DEEPSEEK, lambda body: _read_marked(read_deepseek(body))),
    "unknown": lambda text, _: Parsed(text, []),
}
