"""Messages as workflows hold them and as chat templates want them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from areal_async.api import Message, ToolCall
from areal_async.errors import WorkflowError
from areal_async.rollout.policy.json_size import decode_object
from areal_async.vision.parts import part_for_template

_SHAPE = 'a list of messages, [{"role": "user", "content": "..."}]'


def checked_messages(messages: object) -> list[Message]:
    """Return a conversation as a list.

    Raises:
        WorkflowError: it is none.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise WorkflowError(f"messages: got a {type(messages).__name__}, need {_SHAPE}")
    listed = list(messages)
    if not listed:
        raise WorkflowError(f"messages: got none, need {_SHAPE}")
    for number, message in enumerate(listed, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            got = f"a {type(message).__name__}" if not isinstance(message, Mapping) else "no role"
            raise WorkflowError(f"messages: got {got} in place {number}, need {_SHAPE}")
        if message["role"] in ("user", "system") and message.get("content") is None:  # templates would write none
            raise WorkflowError(f"messages: got {sorted(message)} without content in place {number}, need {_SHAPE}")
    return listed


def are_same(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Say whether two conversations say the same; what is None, empty or absent is one and the same."""
    return len(messages) == len(others) and all(map(is_same, messages, others))


def is_same(message: Message, other: Message) -> bool:
    """Say whether two messages say the same, no matter who copied them and which keys were filled with None."""
    return message is other or _filled(message) == _filled(other)


def for_template(message: Message, *, has_text_arguments: bool = False) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as objects: templates write them out as JSON.

    In the form that travels (OpenAI's) they are a string of JSON; a string that holds no object stays one. Of an image
    a template is told that it stands there, and nothing else.

    Args:
        has_text_arguments: leave them the string.
    """
    rendered = dict(message)
    if message.get("content") is None:
        rendered["content"] = ""
    elif isinstance(message["content"], list | tuple):
        rendered["content"] = [part_for_template(part) for part in message["content"]]
    if message.get("tool_calls") and not has_text_arguments:
        rendered["tool_calls"] = [_with_objects(call) for call in message["tool_calls"]]
    return rendered


def _filled(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value not in (None, "", [])}


def _with_objects(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = decode_object(function["arguments"])
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def reply_message(text: str, content: str, calls: list[ToolCall]) -> dict[str, Any]:
    """Return what goes on with the conversation; calls that are none stay in its text, as they were written."""
    if not calls or any(call.error for call in calls):
        return assistant_message(text)
    return assistant_message(
        content, [function_call(call.id, call.name, msgspec.json.encode(call.arguments).decode()) for call in calls]
    )


def assistant_message(content: str, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return what the model says, as OpenAI's chat API writes it."""
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as OpenAI's chat API writes it; ``arguments`` is JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
