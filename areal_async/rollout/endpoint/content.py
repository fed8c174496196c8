"""What the APIs' messages have in common: parts of text and images, names of tools, who is answered by a result. Pure.

An image stays the URL that it came in: the policy takes it in, or says why not.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from areal_async.rollout.endpoint.calls import ToolChoice
from areal_async.rollout.endpoint.refusals import Refusal, refuse_if
from areal_async.vision.parts import is_image

Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,128}\Z")]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class TextPart(msgspec.Struct):
    """One part of a message's content. What has neither text nor an image is refused."""

    type: str
    text: str | None = None

    @property
    def shown_url(self) -> str | None:
        """URL of the image that it is, where it is one."""
        return None


def content_of(
    content: str | Sequence[TextPart] | None, *, types: Sequence[str], param: str
) -> str | list[dict[str, Any]]:
    """Return a message's content: as its text, or in parts where it has images.

    Raises:
        Refusal: a part is neither, or an image that is somewhere else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return joined([part_of(part, types=types, param=f"{param}[{number}]") for number, part in enumerate(content)])


def text_of(content: str | Sequence[TextPart] | None, *, types: Sequence[str], param: str) -> str:
    """Return the text of a message's content, its parts on lines of their own.

    Raises:
        Refusal: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(part, types, f"{param}[{number}]") for number, part in enumerate(content))


def part_of(part: TextPart, *, types: Sequence[str], param: str) -> dict[str, Any]:
    """Return a part as OpenAI's chat API writes it.

    Raises:
        Refusal: as ``content_of``.
    """
    url = part.shown_url
    if url is None:
        return {"type": "text", "text": _text(part, types, param)}
    refuse_if(url[:5].lower() != "data:", param, "got an image by its address, need the image itself, in base64")
    return {"type": "image_url", "image_url": {"url": url}}


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a content: texts on lines of their own where there are no images."""
    return parts if any(map(is_image, parts)) else "\n".join(part["text"] for part in parts)


def _text(part: TextPart, types: Sequence[str], where: str) -> str:
    if part.type not in types or part.text is None:
        message = f"{where}: got a part of type {part.type!r:.50}, this model takes text only"
        raise Refusal("bad_request", message, param=where, code="invalid_value")
    return part.text


def tool_result(call_id: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer to a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def with_named_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose answers to calls are named like their tools, where the calls are before them."""
    named: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        for call in reversed(message.get("tool_calls") or ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message["tool_call_id"]) if message["role"] == "tool" else None
        named.append({**message, "name": name} if name is not None else message)
    return named


def chosen_tools(
    tools: list[dict[str, Any]],
    kind: str,
    names: Sequence[str] = (),
    *,
    is_single: bool,
    leaves_others_out: bool = False,
) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Return the tools that the model is told of, and which calls an answer may have.

    Args:
        tools: all that the request has.
        kind: ``none``; ``auto``; ``required`` for a call of any tool, or of one of ``names`` where there are any;
            ``one`` for a single call.
        leaves_others_out: the model is told of ``names`` alone.

    Raises:
        Refusal: there is no such tool, or none at all.
    """
    if kind == "none":
        return [], ToolChoice()
    param = "tool_choice"
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        refuse_if(name not in known, param, f"got the tool {name!r:.80}, need one of those in tools")
    refuse_if(kind != "auto" and not tools, param, "got a call to be made without tools, need at least one tool")
    refuse_if(kind == "one" and not names, param, "got no name of a tool, need one")
    if leaves_others_out:
        refuse_if(not names, param, "got no tool that is allowed, need one at least; else take none")
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    is_single = (is_single or kind == "one") and bool(tools)
    return tools, ToolChoice(is_required=kind != "auto", names=tuple(names), is_single=is_single)
