"""OpenAI's Chat Completions: a request -> a call, and replies -> its objects and events. Pure.

Left out of account, since they are hints, or about somebody else's service: ``seed`` (siblings have to differ),
``reasoning_effort``, ``verbosity``, ``user``, ``metadata``, ``store``, ``service_tier``, prompt caching and the rest
that is not named here. What would change the answer and cannot be had is refused.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from areal_async.rollout.endpoint.calls import MAX_REPLIES, Call, Finish, Refusal, RefusalKind, Said, data_event, read
from areal_async.rollout.endpoint.content import (
    AtLeastZero,
    Count,
    Name,
    Probability,
    StopString,
    cannot_force,
    function_call,
    function_tool,
    refuse_if,
    text_of,
    tool_result,
)

_FINISH: dict[Finish, str] = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}
_STATUS: dict[RefusalKind, int] = {
    "bad_request": 400, "too_long": 400, "unauthorized": 401, "not_found": 404, "not_allowed": 405, "too_large": 413,
    "unavailable": 503, "internal": 500,
}  # fmt: skip
_CODE: dict[RefusalKind, str] = {"unauthorized": "invalid_api_key", "too_long": "context_length_exceeded"}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"] = "function"
    function: _Function = msgspec.field(default_factory=lambda: _Function(""))


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _FunctionSchema(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _FunctionSchema
    type: Literal["function"] = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Request(msgspec.Struct, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLIES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: AtLeastZero | None = None
    top_p: Probability | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopString | list[StopString] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    response_format: _Format | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: Any = None


def parse(body: bytes) -> "ChatExchange":
    """Read a request.

    Raises:
        Refusal: it is malformed, or wants what cannot be had here.
    """
    request = read(body, _Request)
    _check(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    wanted = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_new_tokens": request.max_completion_tokens or request.max_tokens,
        "stop": tuple(stop) if stop else None,
    }
    call = Call(
        messages=_messages(request.messages),
        tools=_tools(request),
        sampling={name: value for name, value in wanted.items() if value is not None},
        n=request.n or 1,
        is_streamed=bool(request.stream),
        wants_logprobs=bool(request.logprobs),
    )
    wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return ChatExchange(call, request.model, wants_usage=wants_usage)


def _check(request: _Request) -> None:
    refuse_if(bool(request.functions) or bool(request.function_call), "functions", "no longer spoken here, use tools")
    refuse_if(bool(request.top_logprobs), "top_logprobs", "only sampled tokens have logprobs here, need 0")
    refuse_if(bool(request.logit_bias), "logit_bias", "cannot be had here, leave it out")
    refuse_if(request.web_search_options is not None, "web_search_options", "cannot be had here, leave it out")
    for name in ("frequency_penalty", "presence_penalty"):
        refuse_if(bool(getattr(request, name)), name, "cannot be had here: need 0, the model is trained as it is")
    format_type = request.response_format.type if request.response_format else "text"
    refuse_if(format_type != "text", "response_format", f"got type {format_type!r:.50}, only 'text' can be had here")
    refuse_if(any(mode != "text" for mode in request.modalities or ()), "modalities", "this model writes text only")
    refuse_if(
        request.parallel_tool_calls is False and bool(request.tools),
        "parallel_tool_calls",
        "got false, but the model says how many calls it makes; leave it out",
    )


def _tools(request: _Request) -> list[dict[str, Any]]:
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise cannot_force("tool_choice", choice if isinstance(choice, str) else str(choice.get("type", "")))
    if choice == "none":
        return []
    return [
        function_tool(tool.function.name, tool.function.description, tool.function.parameters)
        for tool in request.tools or ()
    ]


def _messages(written: Sequence[_Message]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, one in enumerate(written):
        where = f"messages[{number}]"
        content = text_of(one.content, types=("text",), param=f"{where}.content")
        match one.role:
            case "tool":
                if one.tool_call_id is None:
                    refuse_if(True, f"{where}.tool_call_id", "missing, need the id of the call that this answers")
                messages.append(tool_result(one.tool_call_id or "", content, messages))
            case "assistant":
                calls = [
                    function_call(call.id, call.function.name, call.function.arguments) for call in one.tool_calls or ()
                ]
                messages.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
            case _:
                role = "system" if one.role == "developer" else one.role
                messages.append({"role": role, "content": content, **({"name": one.name} if one.name else {})})
    return messages


class ChatExchange:
    """One request and its answers."""

    def __init__(self, call: Call, model: str, *, wants_usage: bool) -> None:
        self.call = call
        self._wants_usage = wants_usage
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def answer(self, said: Sequence[Said]) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": {**one.message, "content": _content(one), "refusal": None},
                "finish_reason": _FINISH[one.finish],
                "logprobs": _logprobs(one),
            }
            for index, one in enumerate(said)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": _usage(said)}

    def writer(self) -> "ChatWriter":
        return ChatWriter(self._head, self.call.n, wants_usage=self._wants_usage)

    def conclude(self, said: Sequence[Said]) -> None:
        """There is nothing to go on from: every request brings its whole conversation."""


class ChatWriter:
    """Writes ``chat.completion.chunk`` events."""

    def __init__(self, head: dict[str, Any], num_choices: int, *, wants_usage: bool) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._num_choices = num_choices
        self._wants_usage = wants_usage

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._num_choices))

    def piece(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"content": text})

    def end(self, index: int, said: Said, rest: str) -> bytes:
        events = self._chunk(index, {"content": rest}) if rest else b""
        for number, call in enumerate(said.tool_calls):
            function = call["function"]
            start = {**call, "index": number, "function": {"name": function["name"], "arguments": ""}}
            events += self._chunk(index, {"tool_calls": [start]})
            going_on = {"index": number, "function": {"arguments": function["arguments"]}}
            events += self._chunk(index, {"tool_calls": [going_on]})
        if said.logprobs is not None:
            events += self._chunk(index, {}, logprobs=_logprobs(said))
        return events + self._chunk(index, {}, finish_reason=_FINISH[said.finish])

    def finish(self, said: Sequence[Said]) -> bytes:
        usage = data_event({**self._head, "choices": [], "usage": _usage(said)}) if self._wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return data_event(error(refusal)) + b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return data_event({**self._head, "choices": [choice]})


def status(refusal: Refusal) -> int:
    """Return the HTTP status of an error."""
    return _STATUS[refusal.kind]


def error(refusal: Refusal) -> dict[str, Any]:
    """Return the JSON object of an error."""
    kind = "server_error" if _STATUS[refusal.kind] >= 500 else "invalid_request_error"
    code = refusal.code or _CODE.get(refusal.kind)
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}}


def logprob_items(said: Said) -> list[dict[str, Any]]:
    """Return the logprobs of the sampled tokens, as both of OpenAI's APIs write them."""
    return [
        {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode()), "top_logprobs": []}
        for one in said.logprobs or ()
    ]


def _logprobs(said: Said) -> dict[str, Any] | None:
    return None if said.logprobs is None else {"content": logprob_items(said), "refusal": None}


def _content(said: Said) -> str | None:
    return None if said.tool_calls and not said.content else said.content


def _usage(said: Sequence[Said]) -> dict[str, Any]:
    num_prompt, num_output = said[0].num_prompt_tokens, sum(one.num_output_tokens for one in said)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
