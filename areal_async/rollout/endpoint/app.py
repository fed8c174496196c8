"""HTTP around the sessions: which API a path speaks, whose key it is, and who has gone away meanwhile.

A request runs as a task in the name of its workflow; here it is only waited for, beside the client's leaving, which
cancels it. Every answer is in the shape of the API that was asked, errors too; both SDKs are told not to try again,
since the policy has, unless the policy has not heard of it: the trajectory asks too much at once, or its body was slow.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_async.rollout.endpoint import anthropic_messages, openai_chat, openai_responses
from areal_async.rollout.endpoint.admission import AdmissionLimits, BodyBudget, announced_bytes, read_body
from areal_async.rollout.endpoint.calls import ApiExchange
from areal_async.rollout.endpoint.refusals import (
    ErrorAnswer,
    Refusal,
    Unexpected,
    anthropic_error,
    openai_error,
)
from areal_async.rollout.endpoint.session import Session, ended, find_session
from areal_async.rollout.policy.offload import run_beside
from areal_async.rollout.user_code.boundary import attributed_to
from areal_async.telemetry import tracing

LONG_BODY_BYTES = 256 << 10
"""A longer body is read beside the loop."""
_ANTHROPIC_HEADERS = ("anthropic-version", "x-api-key")

log = structlog.get_logger()


ErrorWriter = Callable[[Refusal], ErrorAnswer]


class PostRoute(NamedTuple):
    """What answers a POST to one path."""

    name: str
    """The name of the API."""
    error: ErrorWriter
    parse: Callable[[bytes, Session], ApiExchange]


_APIS: Mapping[str, PostRoute] = {
    "chat/completions": PostRoute(
        "OpenAI's Chat Completions",
        openai_error,
        lambda body, session: openai_chat.parse(body, session.unsupported),
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
}


class App:
    """The application of a node's endpoint: ``/<session>/[v1/]<path>``."""

    def __init__(self, sessions: Mapping[str, Session], limits: AdmissionLimits) -> None:
        """Take the sessions by id; they come and go."""
        self._sessions = sessions
        self.room = BodyBudget(limits)
        """The room for the bodies of requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        _, path = _split(scope["path"])
        api = _APIS.get(path)
        try:
            with attributed_to(Unexpected, "endpoint"):
                await self._answer(api, path, scope, receive, send)
        except Refusal as refusal:
            if refusal.kind == "internal":
                log.exception("endpoint.unexpected", cause=refusal.message)
            error = (api.error if api else _guess_error(scope))(refusal)
            await self._refused(refusal, error)(scope, receive, send)

    async def _answer(self, api: PostRoute | None, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        session = find_session(self._sessions, _split(scope["path"])[0], _key(scope))
        if path == "models" or path.startswith("models/"):
            _check_method(scope, "GET")
            asked = path.removeprefix("models").lstrip("/")
            await _json(_model(asked, session.model) if asked else _models(session.model))(scope, receive, send)
            return
        if api is None:
            raise Refusal("not_found", f"path: got {scope['path']!r:.200}, need one of {', '.join(_APIS)}, models")
        _check_method(scope, "POST")
        await _Answering(api, session, self.room, scope, receive, send).run()

    def _refused(self, refusal: Refusal, error: ErrorAnswer) -> Response:
        headers = {"x-should-retry": "true" if refusal.kind in ("busy", "too_slow") else "false"}
        if refusal.kind == "busy":
            headers["retry-after"] = str(self.room.limits.draw_retry_after())
        if refusal.kind == "too_slow":
            headers["connection"] = "close"  # the rest of the request would have to be read before another one
        return _json(error.body, status_code=error.status, headers=headers)


@dataclass(eq=False)
class _Answering:
    """One request that may be answered."""

    api: PostRoute
    session: Session
    room: BodyBudget
    scope: Scope
    receive: Receive
    send: Send
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False

    async def run(self) -> None:
        """Answer it, unless the client leaves or the trajectory ends before.

        Raises:
            Refusal: it is not answered.
        """
        task = self.session.start(self._serve())
        leaving = asyncio.create_task(self._left())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            has_left = leaving.done()
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.wait([task, leaving])
        error = ended() if task.cancelled() else task.exception()
        if error is not None and not has_left and not self.has_begun:
            raise error
        # What has begun and is not to be ended well is left without its end: the connection closes.

    async def _serve(self) -> None:
        session = self.session
        with session.noting_refusal():
            num_bytes = announced_bytes(self.scope, self.room.limits)
        async with self.room.holding(session.id, num_bytes) as shrink:
            with session.noting_refusal():
                body = await read_body(self.receive, self.room.limits)
            if body is None:
                return
            shrink(len(body))
            self.is_read.set()
            async with session.running:
                with session.noting_refusal():
                    exchange = await self._parse(body)
                del body  # what it says is in the exchange
                with tracing.joining(Headers(scope=self.scope)):
                    await self._answer(exchange)

    async def _parse(self, body: bytes) -> ApiExchange:
        parse = partial(self.api.parse, body, self.session)
        return await run_beside(parse) if len(body) > LONG_BODY_BYTES else parse()

    async def _answer(self, exchange: ApiExchange) -> None:
        if not exchange.call.is_streamed:
            reported = await self.session.answer(exchange)
            response = _json(exchange.answer(reported))
            self.has_begun = True
            await response(self.scope, self.receive, self.send)
            return
        async with aclosing(self.session.stream(exchange)) as stream:
            async for events in stream:
                if not self.has_begun:
                    self.has_begun = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await self.send({"type": "http.response.start", "status": 200, "headers": headers})
                await self.send({"type": "http.response.body", "body": events, "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})

    async def _left(self) -> None:
        await self.is_read.wait()  # until then a client that leaves is noticed by the reader
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _split(path: str) -> tuple[str, str]:
    """Return the session's id and the API's path; both SDKs are content with one base URL, with ``/v1`` and without."""
    session_id, _, rest = path.lstrip("/").partition("/")
    while rest.startswith("v1/"):
        rest = rest.removeprefix("v1/")
    return session_id, rest.strip("/")


def _key(scope: Scope) -> str:
    headers = Headers(scope=scope)
    kind, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")


def _guess_error(scope: Scope) -> ErrorWriter:
    """Return the API of a client that asks for what neither has, or both."""
    headers = Headers(scope=scope)
    return anthropic_error if any(name in headers for name in _ANTHROPIC_HEADERS) else openai_error


def _check_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise Refusal("not_allowed", f"method: got {scope['method']:.20}, need {method}")


def _model(name: str, model: str) -> dict[str, Any]:
    """Return what both APIs say of a model; a request may call it by any name."""
    about = {"id": name, "object": "model", "created": 0, "owned_by": "areal_async", "root": model}
    return {**about, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _models(model: str) -> dict[str, Any]:
    one = _model(model, model)
    return {"object": "list", "data": [one], "has_more": False, "first_id": model, "last_id": model}


def _json(value: Any, **options: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", **options)
