"""A conversation that comes back from an agent -> the recorded replies that it is made of. Pure.

An agent holds its API's copies of what the model said: other keys, arguments written again, white space cut off at
the edges, the stop string missing. A message that says the same as a recorded reply *is* that reply, so that the policy
keeps its tokens; any other message of the assistant is the agent's own. Where several replies say the same, one that
answered the same conversation goes first, and of those the latest.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from areal_async.api import Message, Reply
from areal_async.rollout.endpoint.calls import ReportedReply
from areal_async.rollout.policy.json_size import decode_object

_KEY_BYTES = 16
_encoder = msgspec.json.Encoder(order="deterministic")


class _RememberedReply(NamedTuple):
    before: bytes
    """The key of the conversation that it answered."""
    content: str
    message: Message


class Recalled(NamedTuple):
    """A conversation as the policy knows it."""

    messages: list[Message]
    key: bytes
    """Of the conversation as the agent wrote it."""


class Memory:
    """The replies of one trajectory, by what an agent was told of them."""

    def __init__(self) -> None:
        self._recorded: dict[bytes, list[_RememberedReply]] = {}

    def remember(self, before: bytes, reported: ReportedReply, reply: Reply) -> None:
        """Take in a reply to the conversation of a key: to hash one with images takes longer than a loop has."""
        recorded = _RememberedReply(before, reported.content, reply.message)
        self._recorded.setdefault(_key(b"", reported.message), []).append(recorded)

    def recall(self, messages: Sequence[Message]) -> Recalled:
        """Return the conversation with recorded replies in the place of their copies."""
        recalled: list[Message] = []
        before = b""
        for message in messages:
            recalled.append(self._find(before, message) or message)
            before = _key(before, message)
        return Recalled(recalled, before)

    def _find(self, before: bytes, message: Message) -> Message | None:
        if message["role"] != "assistant":
            return None
        best: _RememberedReply | None = None
        best_fit = (False, False)
        for recorded in self._recorded.get(_key(b"", message), ()):
            fit = (recorded.before == before, recorded.content == message["content"])
            if best is None or fit >= best_fit:
                best, best_fit = recorded, fit
        return best.message if best else None


def _key(before: bytes, message: Message) -> bytes:
    written = _essence(message) if message["role"] == "assistant" else message
    return blake2b(before + _encoder.encode(written), digest_size=_KEY_BYTES).digest()


def _essence(message: Message) -> list[Any]:
    calls = [_call_essence(call) for call in message.get("tool_calls") or ()]
    return [message["content"].strip(), *calls]


def _call_essence(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function["arguments"]
    with suppress(OverflowError):  # no object, or too much: compared as it is written
        if (decoded := decode_object(arguments)) is not None:
            arguments = _encoder.encode(decoded).decode()
    return [call["id"], function["name"], arguments]
