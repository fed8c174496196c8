"""OpenAI's Responses: a request -> a call, and a reply -> its objects and events. Pure.

A reply is one ``message`` item, where it says anything, and a ``function_call`` item per call; all have ids that end
alike, by which they are put together again when they come back. ``previous_response_id`` goes on from what is
remembered of this trajectory. The structs say which fields are honoured and which are hints; ``reading`` sees to the
others.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from areal_async.rollout.endpoint.calls import (
    ApiExchange,
    CompletionRequest,
    Form,
    ReportedReply,
    ToolChoice,
    named_event,
)
from areal_async.rollout.endpoint.content import (
    Count,
    Name,
    TextPart,
    chosen_tools,
    content_of,
    text_of,
    tool_result,
    with_named_results,
)
from areal_async.rollout.endpoint.openai_chat import logprob_items
from areal_async.rollout.endpoint.reading import Unsupported, read
from areal_async.rollout.endpoint.refusals import Refusal, refuse_if
from areal_async.rollout.endpoint.request import ANY_OBJECT, ApiRequest, call_of
from areal_async.rollout.policy.messages import assistant_message, function_call
from areal_async.rollout.tools.schema import function_schema

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
_REPEATED = ("instructions", "max_output_tokens", "model", "previous_response_id", "temperature", "top_p")
"""Fields of a request that its answer has as they are."""

History = dict[str, list[dict[str, Any]]]
"""Response id -> the conversation that it ended, without instructions, as the agent knows it."""


class _ResponsesPart(TextPart):
    image_url: str | None = None
    HINTS: ClassVar = ("annotations", "logprobs", "prompt_cache_breakpoint", "cache_control", "parsed", "detail")

    @property
    def shown_url(self) -> str | None:
        """URL of the image that it is, where it is one."""
        return self.image_url if self.type == "input_image" else None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_ResponsesPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_ResponsesPart] | None = None
    HINTS: ClassVar = ("status", "phase", "summary", "encrypted_content", "parsed_arguments")


class _ResponsesTool(msgspec.Struct):
    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    HINTS: ClassVar = ("strict",)


class _ResponsesChoiceTool(msgspec.Struct):
    name: str
    type: Literal["function"] = "function"


class _ResponsesToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[_ResponsesChoiceTool] | None = None


class _ResponsesFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    HINTS: ClassVar = ("name", "description", "strict")


class _Text(msgspec.Struct):
    format: _ResponsesFormat | None = None
    HINTS: ClassVar = ("verbosity",)


class _ResponsesRequest(ApiRequest, kw_only=True):
    input: str | list[_Item] = msgspec.field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_ResponsesTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    text: _Text | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    HINTS: ClassVar = (
        "stream_options", "user", "service_tier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "max_tool_calls", "reasoning", "client_metadata",
    )  # fmt: skip


def parse(body: bytes, history: History, unsupported: Unsupported) -> "ResponsesExchange":
    """Read a request.

    Raises:
        Refusal: it is malformed, goes on from no response of this trajectory, or wants what cannot be had here.
    """
    request = read(body, _ResponsesRequest, unsupported)
    conversation = _before(request.previous_response_id, history)
    if isinstance(request.input, str):
        conversation.append({"role": "user", "content": request.input})
    else:
        _add_items(conversation, request.input)
        conversation = with_named_results(conversation)
    refuse_if(not conversation, "input", "got nothing, need at least one message")
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    text_format = (request.text.format if request.text else None) or _ResponsesFormat()
    wants_logprobs = _LOGPROBS in (request.include or ())
    refuse_if(bool(request.top_logprobs) and not wants_logprobs, "top_logprobs", f"need include=[{_LOGPROBS!r}] too")
    call = call_of(
        request,
        [*instructions, *conversation],
        _tools(request),
        form=_form(text_format),
        form_param="text.format",
        max_new_tokens=request.max_output_tokens,
        wants_logprobs=wants_logprobs,
        num_top_logprobs=request.top_logprobs or 0,
    )
    about = {
        **{name: getattr(request, name) for name in _REPEATED},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "store": request.store is not False,
        "text": {"format": _without_nulls(text_format)},
        "tool_choice": _without_nulls(request.tool_choice) or "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools],
        "top_logprobs": request.top_logprobs or 0,
    }
    return ResponsesExchange(call, conversation, about, history)


def _without_nulls(value: Any) -> Any:
    """Return a part of a request as the answer repeats it."""
    built = msgspec.to_builtins(value)
    return {name: one for name, one in built.items() if one is not None} if isinstance(built, dict) else built


def _form(wanted: _ResponsesFormat) -> Form | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    refuse_if(wanted.schema is None, "text.format.schema", "missing, need the schema of the answer")
    return Form("json_schema", wanted.schema)


def _before(previous_id: str | None, history: History) -> list[dict[str, Any]]:
    if previous_id is None:
        return []
    if previous_id not in history:
        raise Refusal(
            "bad_request",
            f"previous_response_id: there is no response {previous_id!r:.80} that was to be stored",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return list(history[previous_id])


def _tools(request: _ResponsesRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Return what the model is told of, and what it may call of that."""
    tools = []
    for number, tool in enumerate(request.tools or ()):
        is_function = tool.type == "function" and tool.name is not None
        refuse_if(not is_function, f"tools[{number}]", f"got type {tool.type!r:.50}, need a named function")
        tools.append(function_schema(tool.name or "", tool.description, tool.parameters))
    choose = partial(chosen_tools, tools, is_single=request.parallel_tool_calls is False)
    wanted = request.tool_choice
    if wanted is None or isinstance(wanted, str):
        return choose(wanted or "auto")
    if wanted.type == "function":
        return choose("one", [wanted.name] if wanted.name else [])
    return choose(wanted.mode, [tool.name for tool in wanted.tools or ()], leaves_others_out=True)


def _add_items(messages: list[dict[str, Any]], items: Sequence[_Item]) -> None:
    """Append what items say: calls belong to the message before them that came in the same reply."""
    source: str | None = None
    is_open = False
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.type:
            case "message":
                messages.append(_message(item, where))
                source, is_open = _source(item), messages[-1]["role"] == "assistant"
            case "function_call":
                refuse_if(not item.call_id or not item.name, where, "need the call_id and the name of the call")
                call = function_call(item.call_id or "", item.name or "", item.arguments or "")
                if not is_open or _source(item) not in (source, None):
                    messages.append(assistant_message(""))
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
                source, is_open = _source(item), True
            case "function_call_output":
                refuse_if(not item.call_id, where, "need the call_id that this answers")
                content = content_of(item.output, types=_TEXTS, param=f"{where}.output")
                messages.append(tool_result(item.call_id or "", content))
                is_open = False
            case "reasoning":
                pass  # the model never said any
            case _:
                refuse_if(True, where, f"got an item of type {item.type!r:.50}, need messages, calls and their outputs")


def _message(item: _Item, where: str) -> dict[str, Any]:
    role = "system" if item.role == "developer" else item.role
    refuse_if(
        role not in ("system", "user", "assistant"),
        f"{where}.role",
        f"got {role!r:.50}, need system, user or assistant",
    )
    read_content = text_of if role == "assistant" else content_of
    return {"role": role, "content": read_content(item.content, types=_TEXTS, param=f"{where}.content")}


def _source(item: _Item) -> str | None:
    """Return which reply an item was part of, where its id says so."""
    return item.id.partition("_")[2].partition("_")[0] if item.id else None


class ResponsesExchange(ApiExchange):
    """One request and its answers: a ``response``, or ``response.created`` to ``response.completed``."""

    def __init__(
        self, call: CompletionRequest, conversation: list[dict[str, Any]], about: dict[str, Any], history: History
    ) -> None:
        """Take in ``about`` what a response repeats of its request."""
        self.call = call
        self._history = history
        self._conversation = conversation
        self._number = secrets.token_hex(12)
        self.id = f"resp_{self._number}"
        self._about = {"id": self.id, "object": "response", "created_at": int(time.time()), **about}
        self._num_events = 0
        self._num_items = 0
        self._is_in_text = False

    def answer(self, replies: Sequence[ReportedReply]) -> dict[str, Any]:
        """Return a ``response``."""
        (one,) = replies
        is_cut = one.finish == "length"
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(one),
            "usage": _usage(one),
        }

    def conclude(self, replies: Sequence[ReportedReply]) -> None:
        """Remember the conversation that the next response may go on from."""
        if self._about["store"]:
            self._history[self.id] = [*self._conversation, replies[0].message]

    def _response(self, status: str) -> dict[str, Any]:
        """Return a response without any output yet."""
        unsaid: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._about, "status": status, "truncation": "disabled", **unsaid}

    def _items(self, reply: ReportedReply) -> list[dict[str, Any]]:
        """Return a reply as output items."""
        status = "incomplete" if reply.finish == "length" else "completed"
        says_something = bool(reply.content) or not reply.tool_calls
        message = [{**self._message_item(status), "content": [text_part(reply)]}] if says_something else []
        calls = [self._call_item(number, call, "completed") for number, call in enumerate(reply.tool_calls)]
        return message + calls

    def _message_item(self, status: str) -> dict[str, Any]:
        """Return a message without any content yet."""
        return {"id": f"msg_{self._number}", "type": "message", "role": "assistant", "status": status, "content": []}

    def _call_item(self, number: int, call: Mapping[str, Any], status: str) -> dict[str, Any]:
        function = call["function"]
        return {
            "id": f"fc_{self._number}_{number}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, index: int, text: str) -> bytes:
        start = b"" if self._is_in_text else self._open_text()
        return start + self._text_event("delta", delta=text, logprobs=[])

    def end(self, index: int, reply: ReportedReply, rest: str) -> bytes:
        items = self._items(reply)
        events = self.piece(0, rest) if rest else b""
        if items[0]["type"] == "message":
            if not self._is_in_text:
                events += self._open_text()
            (part,) = items[0]["content"]
            events += self._text_event("done", text=reply.content, logprobs=part["logprobs"])
            events += self._event("response.content_part.done", **self._in_text(), part=part)
            events += self._close(items.pop(0))
        return events + b"".join(self._call(item) for item in items)

    def finish(self, replies: Sequence[ReportedReply]) -> bytes:
        response = self.answer(replies)
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> bytes:
        problem = {"code": "server_error", "message": refusal.message}
        response = {**self._response("failed"), "error": problem}
        return self._event("response.failed", response=response)

    def _open_text(self) -> bytes:
        self._is_in_text = True
        item = self._message_item("in_progress")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=self._num_items, item=item)
        return added + self._event("response.content_part.added", **self._in_text(), part=part)

    def _call(self, item: dict[str, Any]) -> bytes:
        start = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": self._num_items}
        arguments = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", output_index=self._num_items, item=start)
            + self._event(f"{arguments}.delta", **place, delta=item["arguments"])
            + self._event(f"{arguments}.done", **place, name=item["name"], arguments=item["arguments"])
            + self._close(item)
        )

    def _close(self, item: dict[str, Any]) -> bytes:
        self._num_items += 1
        return self._event("response.output_item.done", output_index=self._num_items - 1, item=item)

    def _in_text(self) -> dict[str, Any]:
        item_id = self._message_item("")["id"]
        return {"item_id": item_id, "output_index": self._num_items, "content_index": 0}

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.output_text.{kind}", **self._in_text(), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": self._num_events - 1, **fields})


def text_part(reply: ReportedReply) -> dict[str, Any]:
    """Return the text of a reply as a part of a message."""
    return {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": logprob_items(reply)}


def _usage(reply: ReportedReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_output_tokens,
    }
