"""What the APIs' messages have in common: parts of text, names of tools, and who is answered by a result. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from areal_async.rollout.endpoint.calls import Refusal

Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,128}\Z")]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class Part(Protocol):
    """One part of a message's content."""

    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str | None: ...


def text_of(content: str | Sequence[Part] | None, *, types: Sequence[str], param: str) -> str:
    """Return the text of a message's content, its parts on lines of their own.

    Raises:
        Refusal: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in types or part.text is None:
            where = f"{param}[{number}]"
            raise Refusal(
                "bad_request", f"{where}: got a part of type {part.type!r:.50}, this model takes text only", param=where
            )
        texts.append(part.text)
    return "\n".join(texts)


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool as chat templates take it."""
    about = {"description": description} if description else {}
    empty = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or empty}}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as OpenAI's chat API writes it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, text: str, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer to a call, named like the tool where ``messages`` have the call."""
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if call["id"] == call_id:
                return {"role": "tool", "tool_call_id": call_id, "name": call["function"]["name"], "content": text}
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def refuse_if(is_wrong: bool, param: str, message: str) -> None:
    """Refuse a request for one of its fields.

    Raises:
        Refusal: it is wrong.
    """
    if is_wrong:
        raise Refusal("bad_request", f"{param}: {message}", param=param)


def cannot_force(param: str, got: str) -> Refusal:
    """Return the refusal of a request that would have the model call a tool."""
    return Refusal(
        "bad_request",
        f"{param}: got {got!r:.80}, but no call can be forced here: what the model says has to be its own; "
        "leave it to the model or forbid calls",
        param=param,
    )
