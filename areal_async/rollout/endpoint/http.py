"""One request over HTTP: where it goes, whose it says that it is, and its answer, which its client may not wait for.

Invariant: an answer that has begun comes to its end or is cut off, which its client sees; it is never an error then.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_async.rollout.endpoint import anthropic_messages, openai_chat, openai_completions, openai_responses
from areal_async.rollout.endpoint.admission import AdmissionLimits, read_body
from areal_async.rollout.endpoint.calls import ApiExchange
from areal_async.rollout.endpoint.refusals import ErrorAnswer, Refusal, anthropic_error, openai_error
from areal_async.rollout.endpoint.session import Session
from areal_async.rollout.policy.offload import run_beside

LONG_BODY_BYTES = 256 << 10
"""A longer body is read beside the loop."""
_versions = re.compile("/*(?:v1/)*").match  # at once: anybody may send a path of thousands
_ANTHROPIC_HEADERS = ("anthropic-version", "x-api-key")

T = TypeVar("T")
ErrorWriter = Callable[[Refusal], ErrorAnswer]


class PostRoute(NamedTuple):
    """What answers a POST to one path."""

    name: str
    """The name of the API."""
    error: ErrorWriter
    parse: Callable[[bytes, Session], ApiExchange]


APIS: Mapping[str, PostRoute] = {
    "chat/completions": PostRoute(
        "OpenAI's Chat Completions",
        openai_error,
        lambda body, session: openai_chat.parse(body, session.unsupported),
    ),
    "completions": PostRoute(
        "OpenAI's Completions",
        openai_error,
        lambda body, session: openai_completions.parse(body, session.unsupported),
    ),
    "responses": PostRoute(
        "OpenAI's Responses",
        openai_error,
        lambda body, session: openai_responses.parse(body, session.history, session.unsupported),
    ),
    "messages": PostRoute(
        "Anthropic's Messages",
        anthropic_error,
        lambda body, session: anthropic_messages.parse(body, session.unsupported),
    ),
    "messages/count_tokens": PostRoute(
        "Anthropic's count of tokens",
        anthropic_error,
        lambda body, session: anthropic_messages.parse_count(body, session.unsupported),
    ),
}


@dataclass(eq=False)
class HttpRequest:
    """One request that may be answered."""

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[str, str] = field(default_factory=dict)
    """More of its answer."""
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    """Some of the answer is sent."""

    async def wait_for(self, task: "asyncio.Task[None]", cancelled: Callable[[], Refusal]) -> None:
        """Wait for the task that answers it, unless the client leaves before, which cancels it.

        Args:
            cancelled: why it is not answered where others have cancelled the task.

        Raises:
            Refusal: it is not answered; or whatever else the task has raised.
        """
        leaving = asyncio.create_task(self._left())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            has_left = leaving.done()
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.wait([task, leaving])
        error = cancelled() if task.cancelled() else task.exception()
        if error is not None and not has_left and not self.has_begun:
            raise error
        # What has begun and is not to be ended well is left without its end: the connection closes.

    async def read_body(self, limits: AdmissionLimits) -> bytes | None:
        """Return its body; None where the client has left.

        Raises:
            Refusal: it is too long, or too slow to come.
        """
        body = await read_body(self.receive, limits)
        if body is not None:
            self.is_read.set()
        return body

    async def answer(self, session: Session, exchange: ApiExchange) -> None:
        """Answer it, whole or as events.

        Raises:
            Refusal: it failed before anything was said.
        """
        if not exchange.call.is_streamed:
            reported = await session.answer(exchange)
            response = json_response(exchange.answer(reported), headers=self.headers)
            self.has_begun = True
            await response(self.scope, self.receive, self.send)
            return
        async with aclosing(session.stream(exchange)) as stream:
            async for events in stream:
                await self.send_events(events)
        await self.end_events()

    async def send_events(self, events: bytes) -> None:
        """Send some more of an answer that is events."""
        if not self.has_begun:
            self.has_begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self.headers}
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": 200, "headers": raw})
        await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self) -> None:
        """Send the end of an answer that is events."""
        await self.send({"type": "http.response.body", "body": b""})

    async def _left(self) -> None:
        await self.is_read.wait()  # until then a client that leaves is noticed by the reader
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def parse_body(api: PostRoute, body: bytes, session: Session) -> ApiExchange:
    """Read what a request says, a long one beside the loop.

    Raises:
        Refusal: it is malformed, or wants what cannot be had.
    """
    return await read_beside(body, lambda whole: api.parse(whole, session))


async def read_beside(body: bytes, read: Callable[[bytes], T]) -> T:
    """Return what is read of a body: of a long one beside the loop."""
    return await run_beside(partial(read, body)) if len(body) > LONG_BODY_BYTES else read(body)


def without_version(path: str) -> str:
    """Return an API's path; both SDKs are content with one base URL, with ``/v1`` and without."""
    found = _versions(path)
    assert found is not None
    return path[found.end() :].strip("/")


def key_of(scope: Scope) -> str:
    """Return the key that a request has, in the way of either SDK; empty for none."""
    headers = Headers(scope=scope)
    kind, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")


def guess_error(scope: Scope) -> ErrorWriter:
    """Return the API of a client that asks for what neither has, or both."""
    headers = Headers(scope=scope)
    return anthropic_error if any(name in headers for name in _ANTHROPIC_HEADERS) else openai_error


def check_method(scope: Scope, method: str) -> None:
    """Refuse another method.

    Raises:
        Refusal: it is one.
    """
    if scope["method"] != method:
        raise Refusal("not_allowed", f"method: got {scope['method']:.20}, need {method}")


def describe_model(name: str, root: str) -> dict[str, Any]:
    """Return what both APIs say of a model.

    Args:
        root: its folder or hub name.
    """
    about = {"id": name, "object": "model", "created": 0, "owned_by": "areal_async", "root": root}
    return {**about, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def list_models(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what both APIs say of all models; there is at least one."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"object": "list", "data": models, "has_more": False, **ends}


def json_response(value: Any, **options: Any) -> Response:
    """Return a response that is one JSON value, with these of starlette's options."""
    return Response(msgspec.json.encode(value), media_type="application/json", **options)
