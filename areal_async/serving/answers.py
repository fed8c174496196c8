"""One request that a version answers: to which session and arm it belongs, and the lines that are kept of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from areal_async.protocol.events import now
from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint.calls import ApiExchange
from areal_async.rollout.policy.json_size import has_too_many_values
from areal_async.serving.records import Answer
from areal_async.serving.served_version import ServedVersion
from areal_async.vision.parts import is_image

PROMPT_BYTES = 8
_IMAGE = "[image]"
_deterministic = msgspec.json.Encoder(order="deterministic")


class _Said(msgspec.Struct):
    """What a body may say of who asks, whatever API it is of and whatever else is in it."""

    model: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of where it is to go."""

    model: str
    user: str
    """What its client calls a session, or a user; empty where it says nothing."""


def read_asked(body: bytes, session: str) -> Asked:
    """Read what a body says; nothing where it is malformed, which who answers it says.

    Args:
        session: of the request's header, which goes first.
    """
    try:
        said = _Said() if has_too_many_values(body) else msgspec.json.decode(body, type=_Said)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        said = _Said()
    user_id = said.metadata.get("user_id") if isinstance(said.metadata, dict) else None  # Anthropic's
    names = (session, said.user, said.safety_identifier, user_id)
    user = next((name for name in names if isinstance(name, str) and name), "")
    return Asked(said.model if isinstance(said.model, str) else "", user)


@dataclass(kw_only=True, slots=True)
class Origin:
    """Where an answer comes from: as in its record."""

    api: str
    key: str
    arm: str = ""
    assigned: str = ""
    session: str = ""
    started_s: float = field(default_factory=time.monotonic)


def lines_of(exchange: ApiExchange, origin: Origin, served: ServedVersion, *, has_tokens: bool) -> Iterator[Answer]:
    """Yield what is kept of the replies to one request."""
    call = exchange.call
    messages = [plain_message(one) for one in call.messages]
    tools = msgspec.json.encode(call.tools).decode() if call.tools else ""
    asked = [call.messages, call.tools] if call.prompt is None else call.prompt
    prompt = blake2b(_deterministic.encode(asked), digest_size=PROMPT_BYTES).hexdigest()
    ended, duration_s = now(), round(time.monotonic() - origin.started_s, 4)
    for choice, reply in enumerate(exchange.replies):
        turn = reply.turn
        assert turn is not None
        calls = msgspec.json.encode(reply.tool_calls).decode() if reply.tool_calls else ""
        yield Answer(
            id=exchange.id,
            choice=choice,
            at=ended,
            api=origin.api,
            key=origin.key,
            arm=origin.arm,
            version=served.version,
            assigned=origin.assigned,
            session=origin.session,
            prompt=prompt,
            messages=messages,
            tools=tools,
            completion=reply.content,
            tool_calls=calls,
            finish_reason=reply.finish,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_tokens=reply.num_output_tokens,
            temperature=turn.temperature,
            duration_s=duration_s,
            images=[image.sha256 for image in turn.images],
            prompt_ids=turn.prompt_ids if has_tokens else [],
            token_ids=turn.output_ids if has_tokens else [],
            logprobs=[round(one, 6) for one in turn.logprobs] if has_tokens else [],
        )


def is_of_one_version(turn: Turn, served: ServedVersion) -> bool:
    """Say whether servers have stamped every token with the version that was to answer."""
    return {turn.oldest, *(span.version for span in turn.spans)} == {served.stamp}


def plain_message(message: dict[str, Any]) -> dict[str, str]:
    """Return a message whose fields are all texts, so that a file of them is a table."""
    content = message["content"]
    if not isinstance(content, str):
        content = "\n".join(_IMAGE if is_image(part) else part["text"] for part in content)
    plain = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = msgspec.json.encode(calls).decode()
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
