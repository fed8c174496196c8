"""Calls between special tokens, as Kimi K2, DeepSeek V3 to V3.1 and gpt-oss write them -> calls. Pure, linear in time.

Kimi        <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
            <|tool_call_end|><|tool_calls_section_end|>
DeepSeek    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
            <｜tool▁calls▁end｜>, where V3 has ``function`` before the separator, and NAME and a fence behind it
gpt-oss     messages (OpenAI's harmony): <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
            to=functions.NAME <|constrain|>json<|message|>{...}<|call|>, or <|channel|>final<|message|>...<|return|>

(None has the line breaks that are in it here.) Source: the chat templates of moonshotai/Kimi-K2-Instruct,
deepseek-ai/DeepSeek-V3 and -V3.1, openai/gpt-oss-20b.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
DEEPSEEK_SECTION, DEEPSEEK_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."

_KIMI_ID = re.compile(r"\A\s*(?:functions\.)?([\w.-]{1,128}):([0-9]{1,6})\s*\Z")
_FENCE = "\n```"
_HARMONY_MARK = re.compile(r"(<\|(?:start|channel|message|constrain|end|call|return)\|>)")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")


class MarkedCall(NamedTuple):
    """A call, not yet read."""

    name: str
    arguments: str
    """JSON, if all is well."""
    id: str = ""
    """What the model calls it by, where its format has that."""
    error: str = ""
    """What is wrong with it, in words for the model; empty when nothing is."""


def read_kimi(body: str) -> MarkedCall:
    """Return what stands between the marks of a call."""
    written, found, arguments = body.partition(KIMI_ARGUMENTS)
    name = _KIMI_ID.match(written)
    if not found or name is None:
        shape = f"need {FUNCTIONS}NAME:0{KIMI_ARGUMENTS}{{...}}"
        return MarkedCall("", "", error=f"not a whole call, {shape}")
    return MarkedCall(name[1], arguments, id=f"{FUNCTIONS}{name[1]}:{name[2]}")


def read_deepseek(body: str) -> MarkedCall:
    """Return what stands between the marks of a call."""
    name, found, arguments = body.partition(DEEPSEEK_SEPARATOR)
    if _FENCE in arguments and not arguments.lstrip().startswith("{"):
        name, _, fenced = arguments.partition(_FENCE)
        arguments = fenced.removeprefix("json").rstrip().removesuffix("```")
    if not found or not name.strip():
        return MarkedCall("", "", error=f"not a whole call, need NAME{DEEPSEEK_SEPARATOR}{{...}}")
    return MarkedCall(name.strip(), arguments)


class HarmonyReply(NamedTuple):
    """What a model that writes messages has said."""

    content: str
    """What is for the reader: neither thoughts nor calls."""
    calls: list[MarkedCall]


def read_harmony(text: str) -> HarmonyReply:
    """Part a reply in messages; one without marks is for the reader."""
    told: list[str] = []
    calls: list[MarkedCall] = []
    for header, body in _harmony_messages(text):
        recipient = _RECIPIENT.search(header)
        channel = header.partition(HARMONY_CHANNEL)[2].split()
        if recipient is not None:
            calls.append(_harmony_call(recipient[1], body))
        elif channel[:1] != ["analysis"]:
            told.append(body)
    return HarmonyReply("\n".join(told) if HARMONY_MESSAGE in text or HARMONY_CHANNEL in text else text, calls)


def _harmony_call(recipient: str, body: str) -> MarkedCall:
    if not recipient.startswith(FUNCTIONS):
        return MarkedCall(recipient, "", error=f"there is no {recipient!r} to call, need to={FUNCTIONS}NAME")
    return MarkedCall(recipient.removeprefix(FUNCTIONS), body)


def _harmony_messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield header and body of each message; the prompt has begun the first one."""
    header, body = "", None
    for piece in (*_HARMONY_MARK.split(text), HARMONY_ENDS[0]):
        if piece == HARMONY_START or piece in HARMONY_ENDS:
            if body is not None:
                yield header, body
            header, body = "", None
        elif piece == HARMONY_MESSAGE:
            body = body or ""
        elif body is None:
            header += piece
        else:
            body += piece
