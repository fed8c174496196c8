"""Anthropic's Messages: a request -> a call, and a reply -> its objects and events. Pure.

The structs say which fields are honoured and which are hints; ``reading`` sees to the others. Blocks of thinking are
dropped from a conversation, for the model never said any. Tools that the service runs itself and a beginning of the
answer are refused.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from areal_async.rollout.endpoint.calls import (
    ApiExchange,
    CompletionRequest,
    Finish,
    Form,
    ReportedReply,
    ToolChoice,
    named_event,
)
from areal_async.rollout.endpoint.content import (
    Count,
    Name,
    StopString,
    TextPart,
    chosen_tools,
    content_of,
    joined,
    part_of,
    text_of,
    tool_result,
    with_named_results,
)
from areal_async.rollout.endpoint.reading import Unsupported, read
from areal_async.rollout.endpoint.refusals import Refusal, anthropic_error, refuse_if
from areal_async.rollout.endpoint.request import ApiRequest, call_of
from areal_async.rollout.policy.messages import assistant_message, function_call
from areal_async.rollout.tools.schema import function_schema

_STOP_REASON: dict[Finish, str] = {
    "stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use",
}  # fmt: skip
_UNSAID = ("thinking", "redacted_thinking")


class _ImageSource(msgspec.Struct):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Part(TextPart):
    source: _ImageSource | None = None

    @property
    def shown_url(self) -> str | None:
        """URL of the image that it is, where it is one."""
        if self.type != "image" or self.source is None:
            return None
        return self.source.url or f"data:{self.source.media_type};base64,{self.source.data}"


class _ResultPart(_Part):
    HINTS: ClassVar = ("cache_control", "citations")


class _Block(_Part):
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: str | list[_ResultPart] | None = None
    HINTS: ClassVar = ("is_error", "thinking", "signature", "data", "cache_control", "citations", "caller")


class _MessagesMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _MessagesTool(msgspec.Struct):
    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    HINTS: ClassVar = ("strict", "cache_control", "eager_input_streaming")


class _MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _MessagesFormat(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class _OutputConfig(msgspec.Struct):
    format: _MessagesFormat | None = None
    HINTS: ClassVar = ("effort",)


class _MessagesRequest(ApiRequest, kw_only=True):
    messages: Annotated[list[_MessagesMessage], msgspec.Meta(min_length=1)]
    max_tokens: Count
    system: str | list[_ResultPart] | None = None
    tools: list[_MessagesTool] | None = None
    tool_choice: _MessagesToolChoice | None = None
    stop_sequences: list[StopString] | None = None
    output_config: _OutputConfig | None = None
    output_format: _MessagesFormat | None = None
    HINTS: ClassVar = (
        "metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id",
        "diagnostics", "speed", "thinking",
    )  # fmt: skip


class _CountRequest(_MessagesRequest, kw_only=True):
    max_tokens: Count = 1


def parse(body: bytes, unsupported: Unsupported) -> "MessagesExchange":
    """Read a request.

    Raises:
        Refusal: it is malformed, or wants what cannot be had here.
    """
    request = read(body, _MessagesRequest, unsupported)
    return MessagesExchange(_call(request), request.model)


def parse_count(body: bytes, unsupported: Unsupported) -> "CountExchange":
    """Read a request whose tokens are to be counted: the same, but that it need not say how long an answer may be.

    Raises:
        Refusal: as ``parse``.
    """
    request = read(body, _CountRequest, unsupported)
    return CountExchange(replace(_call(request), is_counted=True, is_streamed=False), request.model)


def _call(request: _MessagesRequest) -> CompletionRequest:
    system = text_of(request.system, types=("text",), param="system")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(request.messages):
        _add(messages, message, f"messages[{number}]")
    refuse_if(
        request.messages[-1].role == "assistant",
        "messages",
        "the last one is the assistant's, but no beginning can be put into the model's mouth here: end with the user's",
    )
    config = request.output_config.format if request.output_config else None
    refuse_if(config is not None and request.output_format is not None, "output_format", "got output_config.format too")
    form = config or request.output_format
    return call_of(
        request,
        with_named_results(messages),
        _tools(request),
        form=Form("json_schema", form.schema) if form else None,
        form_param="output_format" if request.output_format else "output_config.format",
        max_new_tokens=request.max_tokens,
        stop=request.stop_sequences,
    )


def _tools(request: _MessagesRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Return what the model is told of, and what it may call of that."""
    tools = []
    for number, tool in enumerate(request.tools or ()):
        is_custom = tool.type in (None, "custom") and tool.input_schema is not None
        refuse_if(
            not is_custom,
            f"tools[{number}]",
            f"got {tool.name!r:.80} of type {tool.type!r:.50}, need the client's own tool with an input_schema",
        )
        tools.append(function_schema(tool.name, tool.description, tool.input_schema))
    wanted = request.tool_choice or _MessagesToolChoice("auto")
    kind = {"auto": "auto", "any": "required", "tool": "one", "none": "none"}[wanted.type]
    names = [wanted.name] if wanted.name else []
    return chosen_tools(tools, kind, names, is_single=bool(wanted.disable_parallel_tool_use))


def _add(messages: list[dict[str, Any]], message: _MessagesMessage, where: str) -> None:
    """Append what one message of this API says, which may be several of OpenAI's."""
    if isinstance(message.content, str):
        messages.append({"role": message.role, "content": message.content})
        return
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    num_before = len(messages)

    def add_said() -> None:
        if said:
            messages.append({"role": message.role, "content": joined(list(said))})
            said.clear()

    for number, block in enumerate(message.content):
        place = f"{where}.content[{number}]"
        match message.role, block.type:
            case _, "text":
                said.append(part_of(block, types=("text",), param=place))
            case "user", "image":
                refuse_if(block.source is None, f"{place}.source", "missing, need the image itself, in base64")
                said.append(part_of(block, types=("text",), param=place))
            case "assistant", "tool_use":
                refuse_if(not block.id or not block.name, place, "need the id and the name of the call")
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(function_call(block.id, block.name, arguments))
            case "assistant", kind if kind in _UNSAID:
                pass
            case "user", "tool_result":
                refuse_if(not block.tool_use_id, place, "need the tool_use_id that this answers")
                add_said()
                content = content_of(block.content, types=("text",), param=f"{place}.content")
                messages.append(tool_result(block.tool_use_id, content))
            case _:
                refuse_if(
                    True,
                    place,
                    f"got {block.type!r:.50} from {message.role}, this model takes text, images, calls and results",
                )
    if message.role == "assistant":
        messages.append(assistant_message("\n".join(part["text"] for part in said), calls))
    else:
        add_said()
        refuse_if(len(messages) == num_before, f"{where}.content", "got no blocks, need at least one")


class MessagesExchange(ApiExchange):
    """One request and its answers: a ``message``, or ``message_start`` to ``message_stop``.

    How long the prompt is is told at the end of a stream.
    """

    def __init__(self, call: CompletionRequest, model: str) -> None:
        self.call = call
        self.id = f"msg_{secrets.token_hex(12)}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._num_blocks = 0
        self._is_in_text = False

    def answer(self, replies: Sequence[ReportedReply]) -> dict[str, Any]:
        """Return a ``message``."""
        (one,) = replies
        content: list[dict[str, Any]] = [{"type": "text", "text": one.content}] if one.content else []
        content += [{**_block_start(call), "input": msgspec.json.decode(_arguments(call))} for call in one.tool_calls]
        return {**self._head, "content": content, **_end(one), "usage": _usage(one)}

    def begin(self) -> bytes:
        unsaid: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **unsaid, "usage": {"input_tokens": 0, "output_tokens": 0}}
        return named_event({"type": "message_start", "message": message})

    def piece(self, index: int, text: str) -> bytes:
        start = b""
        if not self._is_in_text:
            self._is_in_text = True
            start = self._start({"type": "text", "text": ""})
        return start + self._delta({"type": "text_delta", "text": text})

    def end(self, index: int, reply: ReportedReply, rest: str) -> bytes:
        events = self.piece(index, rest) if rest else b""
        if self._is_in_text:
            events += self._stop()
        for call in reply.tool_calls:
            events += self._start({**_block_start(call), "input": {}})
            events += self._delta({"type": "input_json_delta", "partial_json": _arguments(call)}) + self._stop()
        return events + named_event({"type": "message_delta", "delta": _end(reply), "usage": _usage(reply)})

    def finish(self, replies: Sequence[ReportedReply]) -> bytes:
        return named_event({"type": "message_stop"})

    def fail(self, refusal: Refusal) -> bytes:
        return named_event(anthropic_error(refusal).body)

    def _start(self, block: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _stop(self) -> bytes:
        self._num_blocks += 1
        return named_event({"type": "content_block_stop", "index": self._num_blocks - 1})


class CountExchange(MessagesExchange):
    """A request whose tokens are counted: answered whole, with their number."""

    def answer(self, replies: Sequence[ReportedReply]) -> dict[str, Any]:
        """Return how many tokens the prompt has; ``replies`` are none."""
        return {"input_tokens": self.num_prompt_tokens}


def _block_start(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _arguments(call: dict[str, Any]) -> str:
    arguments: str = call["function"]["arguments"]
    return arguments


def _end(reply: ReportedReply) -> dict[str, Any]:
    return {"stop_reason": _STOP_REASON[reply.finish], "stop_sequence": reply.stop_sequence}


def _usage(reply: ReportedReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "output_tokens": reply.num_output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
