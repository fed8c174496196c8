"""OpenAI's Chat Completions: a request -> a call, and replies -> its objects and events. Pure.

The structs say which fields are honoured and which are hints; ``reading`` sees to the others.
"""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from areal_async.rollout.endpoint.calls import (
    MAX_REPLIES,
    ApiExchange,
    CompletionRequest,
    Finish,
    Form,
    ReportedReply,
    TokenLogprob,
    ToolChoice,
    data_event,
)
from areal_async.rollout.endpoint.content import (
    Count,
    Name,
    StopString,
    TextPart,
    chosen_tools,
    content_of,
    text_of,
    tool_result,
    with_named_results,
)
from areal_async.rollout.endpoint.reading import Unsupported, read
from areal_async.rollout.endpoint.refusals import Refusal, openai_error, refuse_if
from areal_async.rollout.endpoint.request import ANY_OBJECT, ApiRequest, call_of
from areal_async.rollout.policy.messages import assistant_message, function_call
from areal_async.rollout.tools.schema import function_schema

_FINISH: dict[Finish, str] = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}


class _ImageUrl(msgspec.Struct):
    url: str
    HINTS: ClassVar = ("detail",)


class _ChatPart(TextPart):
    refusal: str | None = None
    image_url: _ImageUrl | None = None
    HINTS: ClassVar = ("cache_control", "prompt_cache_breakpoint")

    @property
    def shown_url(self) -> str | None:
        """URL of the image that it is, where it is one."""
        return self.image_url.url if self.type == "image_url" and self.image_url else None


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""
    HINTS: ClassVar = ("parsed_arguments",)


class _ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"] = "function"
    function: _Function = msgspec.field(default_factory=lambda: _Function(""))
    HINTS: ClassVar = ("index",)


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    HINTS: ClassVar = ("refusal", "annotations", "audio", "parsed", "reasoning", "reasoning_content", "cache_control")


class _FunctionSchema(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    HINTS: ClassVar = ("strict",)


class _ChatTool(msgspec.Struct):
    function: _FunctionSchema
    type: Literal["function"] = "function"
    HINTS: ClassVar = ("cache_control",)


class _Named(msgspec.Struct):
    name: str


class _ChatChoiceTool(msgspec.Struct):
    function: _Named
    type: Literal["function"] = "function"


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_ChatChoiceTool]


class _ChatToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    function: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class StreamOptions(msgspec.Struct):
    """What a stream has beside what is said."""

    include_usage: bool | None = None
    HINTS: ClassVar = ("include_obfuscation",)


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any]
    HINTS: ClassVar = ("name", "description", "strict")


class _ChatFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: _JsonSchema | None = None
    format: dict[str, Any] | None = None


class _ChatRequest(ApiRequest, kw_only=True):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[_ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLIES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopString | list[StopString] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: _ChatFormat | None = None
    HINTS: ClassVar = (
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "prediction", "reasoning_effort", "verbosity",
    )  # fmt: skip


def parse(body: bytes, unsupported: Unsupported) -> "ChatExchange":
    """Read a request.

    Raises:
        Refusal: it is malformed, or wants what cannot be had here.
    """
    request = read(body, _ChatRequest, unsupported)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    refuse_if(bool(request.top_logprobs) and not request.logprobs, "top_logprobs", "need logprobs=true beside it")
    call = call_of(
        request,
        with_named_results(_messages(request.messages)),
        _tools(request),
        form=_form(request.response_format),
        form_param="response_format",
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        stop=stop,
        n=request.n or 1,
        wants_logprobs=bool(request.logprobs),
        num_top_logprobs=request.top_logprobs or 0,
    )
    wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return ChatExchange(call, request.model, wants_usage=wants_usage)


def _form(wanted: _ChatFormat | None) -> Form | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.type == "json_schema":
        refuse_if(wanted.json_schema is None, "response_format.json_schema", "missing, need the schema of the answer")
        return Form("json_schema", wanted.json_schema.schema if wanted.json_schema else {})
    refuse_if(wanted.format is None, "response_format.format", "missing, need the format of the answer")
    return Form("structural_tag", {"type": "structural_tag", "format": wanted.format})


def _tools(request: _ChatRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Return what the model is told of, and what it may call of that."""
    tools = [
        function_schema(tool.function.name, tool.function.description, tool.function.parameters)
        for tool in request.tools or ()
    ]
    choose = partial(chosen_tools, tools, is_single=request.parallel_tool_calls is False)
    wanted = request.tool_choice
    if wanted is None or isinstance(wanted, str):
        return choose(wanted or "auto")
    if wanted.type == "function":
        return choose("one", [wanted.function.name] if wanted.function else [])
    allowed = wanted.allowed_tools
    refuse_if(allowed is None, "tool_choice.allowed_tools", "missing, need the mode and the tools")
    assert allowed is not None
    return choose(allowed.mode, [tool.function.name for tool in allowed.tools], leaves_others_out=True)


def _messages(written: Sequence[_ChatMessage]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, one in enumerate(written):
        where = f"messages[{number}]"
        param = f"{where}.content"
        match one.role:
            case "tool":
                missing = "missing, need the id of the call that this answers"
                refuse_if(one.tool_call_id is None, f"{where}.tool_call_id", missing)
                content = content_of(one.content, types=("text",), param=param)
                messages.append(tool_result(one.tool_call_id or "", content))
            case "assistant":
                calls = [
                    function_call(call.id, call.function.name, call.function.arguments) for call in one.tool_calls or ()
                ]
                messages.append(assistant_message(text_of(one.content, types=("text",), param=param), calls))
            case _:
                role = "system" if one.role == "developer" else one.role
                content = content_of(one.content, types=("text",), param=param)
                messages.append({"role": role, "content": content, **({"name": one.name} if one.name else {})})
    return messages


class ChatExchange(ApiExchange):
    """One request and its answers: a ``chat.completion``, or ``chat.completion.chunk`` events."""

    def __init__(self, call: CompletionRequest, model: str, *, wants_usage: bool) -> None:
        self.call = call
        self._wants_usage = wants_usage
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    def answer(self, replies: Sequence[ReportedReply]) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": {**one.message, "content": _content(one), "refusal": None},
                "finish_reason": _FINISH[one.finish],
                "logprobs": _logprobs(one),
            }
            for index, one in enumerate(replies)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(replies)}

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self.call.n))

    def piece(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"content": text})

    def end(self, index: int, reply: ReportedReply, rest: str) -> bytes:
        events = self._chunk(index, {"content": rest}) if rest else b""
        for number, call in enumerate(reply.tool_calls):
            function = call["function"]
            start = {**call, "index": number, "function": {"name": function["name"], "arguments": ""}}
            events += self._chunk(index, {"tool_calls": [start]})
            going_on = {"index": number, "function": {"arguments": function["arguments"]}}
            events += self._chunk(index, {"tool_calls": [going_on]})
        if reply.logprobs is not None:
            events += self._chunk(index, {}, logprobs=_logprobs(reply))
        return events + self._chunk(index, {}, finish_reason=_FINISH[reply.finish])

    def finish(self, replies: Sequence[ReportedReply]) -> bytes:
        usage = self._event([], usage=usage_of(replies)) if self._wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return data_event(openai_error(refusal).body) + b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return data_event({**self._head, "object": "chat.completion.chunk", "choices": choices, **fields})


def logprob_items(reply: ReportedReply) -> list[dict[str, Any]]:
    """Return the logprobs of the sampled tokens, as both of OpenAI's APIs write them."""
    return [
        {**_logprob_item(one), "top_logprobs": [_logprob_item(top) for top in one.top]} for one in reply.logprobs or ()
    ]


def _logprob_item(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}


def _logprobs(reply: ReportedReply) -> dict[str, Any] | None:
    return None if reply.logprobs is None else {"content": logprob_items(reply), "refusal": None}


def _content(reply: ReportedReply) -> str | None:
    return None if reply.tool_calls and not reply.content else reply.content


def usage_of(replies: Sequence[ReportedReply]) -> dict[str, Any]:
    """Return how many tokens the replies to one prompt took."""
    num_prompt, num_output = replies[0].num_prompt_tokens, sum(one.num_output_tokens for one in replies)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
