"""OpenAI's legacy Completions: a text or token ids -> a call without a chat template, and replies -> its objects. Pure.

One prompt a request. A stream comes in one piece, at the end.
"""

import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import msgspec

from areal_async.rollout.endpoint.calls import (
    MAX_REPLIES,
    ApiExchange,
    CompletionRequest,
    ReportedReply,
    ToolChoice,
    data_event,
)
from areal_async.rollout.endpoint.content import Count, StopString
from areal_async.rollout.endpoint.openai_chat import StreamOptions, usage_of
from areal_async.rollout.endpoint.reading import Unsupported, read
from areal_async.rollout.endpoint.refusals import Refusal, openai_error, refuse_if
from areal_async.rollout.endpoint.request import ApiRequest, TokenId, call_of

MAX_TOP_LOGPROBS = 5


class _CompletionsRequest(ApiRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLIES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: StopString | list[StopString] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    HINTS: ClassVar = ("user",)


def parse(body: bytes, unsupported: Unsupported) -> "CompletionsExchange":
    """Read a request.

    Raises:
        Refusal: it is malformed, or wants what cannot be had here.
    """
    request = read(body, _CompletionsRequest, unsupported)
    call = call_of(
        request,
        [],
        ([], ToolChoice()),
        form=None,
        form_param="",
        max_new_tokens=request.max_tokens,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop,
        prompt=_prompt(request.prompt),
        n=request.n or 1,
        wants_logprobs=request.logprobs is not None,
        num_top_logprobs=request.logprobs or 0,
    )
    wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return CompletionsExchange(call, request.model, wants_usage=wants_usage)


def _prompt(given: str | list[Any]) -> str | list[int]:
    """Return the one prompt: a text, ids of tokens, or either in a list."""
    one = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    is_prompt = isinstance(one, str) or all(isinstance(token, int) for token in one)
    refuse_if(not is_prompt or not one, "prompt", "need one prompt a request, a text or ids of tokens, and none empty")
    return one


class CompletionsExchange(ApiExchange):
    """One request and its answers: a ``text_completion``, or events that are such."""

    def __init__(self, call: CompletionRequest, model: str, *, wants_usage: bool) -> None:
        self.call = call
        self._wants_usage = wants_usage
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}

    def answer(self, replies: Sequence[ReportedReply]) -> dict[str, Any]:
        """Return a ``text_completion``."""
        choices = [_choice(index, one.content, one) for index, one in enumerate(replies)]
        return {**self._head, "choices": choices, "usage": usage_of(replies)}

    def begin(self) -> bytes:
        return b""

    def piece(self, index: int, text: str) -> bytes:
        return data_event({**self._head, "choices": [_choice(index, text)]})

    def end(self, index: int, reply: ReportedReply, rest: str) -> bytes:
        return data_event({**self._head, "choices": [_choice(index, rest, reply)]})

    def finish(self, replies: Sequence[ReportedReply]) -> bytes:
        usage = data_event({**self._head, "choices": [], "usage": usage_of(replies)}) if self._wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return data_event(openai_error(refusal).body) + b"data: [DONE]\n\n"


def _choice(index: int, text: str, reply: ReportedReply | None = None) -> dict[str, Any]:
    """Return what there is to say of a reply, or of a piece of it where that is not over."""
    finish = None if reply is None else "length" if reply.finish == "length" else "stop"
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": None if reply is None else _told(reply)}


def _told(reply: ReportedReply) -> dict[str, Any] | None:
    if reply.logprobs is None:
        return None
    texts = [one.text for one in reply.logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in reply.logprobs],
        "top_logprobs": [{top.text: top.logprob for top in one.top} for one in reply.logprobs],
        "text_offset": [*accumulate(map(len, texts), initial=0)][:-1],
    }
