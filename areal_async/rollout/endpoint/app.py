"""HTTP around the sessions: which API a path speaks, whose key it is, and who has gone away meanwhile.

A request runs as a task in the name of its workflow; here it is only waited for, beside the client's leaving, which
cancels it. Every answer is in the shape of the API that was asked, errors too; both SDKs are told not to try again,
since the policy has, unless the policy has not heard of it: the trajectory asks too much at once, or its body was slow.
"""

from collections.abc import Mapping

import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_async.rollout.endpoint.admission import AdmissionLimits, BodyBudget, announced_bytes
from areal_async.rollout.endpoint.http import (
    APIS,
    HttpRequest,
    PostRoute,
    check_method,
    describe_model,
    guess_error,
    json_response,
    key_of,
    list_models,
    parse_body,
    without_version,
)
from areal_async.rollout.endpoint.refusals import ErrorAnswer, Refusal, Unexpected
from areal_async.rollout.endpoint.session import Session, ended, find_session
from areal_async.rollout.user_code.boundary import attributed_to, forget_frames
from areal_async.telemetry import tracing

log = structlog.get_logger()


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
        api = APIS.get(path)
        try:
            with attributed_to(Unexpected, "endpoint"):
                await self._answer(api, path, HttpRequest(scope, receive, send))
        except Refusal as refusal:
            if refusal.kind == "internal":
                log.exception("endpoint.unexpected", cause=refusal.message)
            forget_frames(refusal)
            error = (api.error if api else guess_error(scope))(refusal)
            await self._refused(refusal, error)(scope, receive, send)

    async def _answer(self, api: PostRoute | None, path: str, request: HttpRequest) -> None:
        scope = request.scope
        session = find_session(self._sessions, _split(scope["path"])[0], key_of(scope))
        if path == "models" or path.startswith("models/"):
            check_method(scope, "GET")
            asked = path.removeprefix("models").lstrip("/")  # a request may call it by any name
            one = describe_model(asked or session.model, session.model)
            await json_response(one if asked else list_models([one]))(scope, request.receive, request.send)
            return
        if api is None:
            raise Refusal("not_found", f"path: got {scope['path']!r:.200}, need one of {', '.join(APIS)}, models")
        check_method(scope, "POST")
        await request.wait_for(session.start(self._serve(api, session, request)), ended)

    async def _serve(self, api: PostRoute, session: Session, request: HttpRequest) -> None:
        limits = self.room.limits
        with session.noting_refusal():
            num_bytes = announced_bytes(request.scope, limits)
        async with self.room.holding(session.id, num_bytes) as shrink:
            with session.noting_refusal():
                body = await request.read_body(limits)
            if body is None:
                return
            shrink(len(body))
            async with session.running:
                with session.noting_refusal():
                    exchange = await parse_body(api, body, session)
                del body  # what it says is in the exchange
                with tracing.joining(Headers(scope=request.scope)):
                    await request.answer(session, exchange)

    def _refused(self, refusal: Refusal, error: ErrorAnswer) -> Response:
        headers = {"x-should-retry": "true" if refusal.kind in ("busy", "too_slow") else "false"}
        if refusal.kind == "busy":
            headers["retry-after"] = str(self.room.limits.draw_retry_after())
        if refusal.kind == "too_slow":
            headers["connection"] = "close"  # the rest of the request would have to be read before another one
        return json_response(error.body, status_code=error.status, headers=headers)


def _split(path: str) -> tuple[str, str]:
    """Return the session's id and the API's path."""
    session_id, _, rest = path.lstrip("/").partition("/")
    return session_id, without_version(rest)
