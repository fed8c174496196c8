"""The endpoint over HTTP: who asks, which arm answers, and what there is to say of an answer.

``APIS`` and ``OWN`` are its paths, with ``/v1`` and without. Invariants: who has no key learns nothing but whether it
is well; what is taken on is bounded, and what is not taken on is told so at once; a request that is taken on is
answered, or ends in one error in the words of its API.
"""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_async.config.settings import Settings
from areal_async.process.bell import Bell
from areal_async.process.plain_text import escaped
from areal_async.protocol.events import now
from areal_async.protocol.fields import MAX_REWARD
from areal_async.rollout.endpoint.admission import AdmissionLimits, BodyBudget, announced_bytes, read_body
from areal_async.rollout.endpoint.calls import ApiExchange
from areal_async.rollout.endpoint.http import (
    APIS,
    LONG_BODY_BYTES,
    HttpRequest,
    PostRoute,
    check_method,
    describe_model,
    guess_error,
    json_response,
    key_of,
    list_models,
    parse_body,
    read_beside,
    without_version,
)
from areal_async.rollout.endpoint.reading import Unsupported
from areal_async.rollout.endpoint.refusals import Refusal, Unexpected
from areal_async.rollout.endpoint.session import Session
from areal_async.rollout.policy.offload import run_beside
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.user_code.boundary import attributed_to
from areal_async.serving.answers import Asked, Origin, is_of_one_version, lines_of, read_asked
from areal_async.serving.arms import Arm
from areal_async.serving.keys import Keyring
from areal_async.serving.records import (
    ANSWERS,
    FEEDBACK,
    MAX_CHOICE,
    MAX_COMMENT,
    MAX_RATING,
    MIN_RATING,
    Feedback,
    FeedbackLine,
    Recorder,
)
from areal_async.serving.served_version import ServedVersion
from areal_async.serving.split import Share, choose, session_id
from areal_async.telemetry import tracing

OWN = {
    "feedback": ("POST", "what somebody says of an answer"),
    "models": ("GET", "the arms and their versions"),
    "models/NAME": ("GET", "one of them"),
    "metrics": ("GET", "numbers for Prometheus"),
    "health": ("GET", "whether there are answers; needs no key"),
}
"""Path -> what it is asked with, and for; beside those of the APIs."""
SESSION, VERSION, ARM, REQUEST_ID = "x-areal-session", "x-areal-version", "x-areal-arm", "x-request-id"
"""Headers: of requests the first, of answers the others."""
MAX_FEEDBACK_BYTES = 32 << 10
LATE_END_S = 10.0
"""Time in which a client takes in the end of an answer whose deadline is over."""
MAX_KNOWN = 1 << 16
"""Answers whose feedback is known to be of one."""
RETRIED = ("busy", "too_slow", "unavailable")
"""Refusals after which a client does well to come again."""

MAX_CAUSE = 200
_NEED = {
    "$": "an object with the id of an answer, and a reward, a rating or a comment",
    "id": "the id of an answer, as its body and its header x-request-id have it",
    "choice": f"a whole number from 0 to {MAX_CHOICE}",
    "reward": f"a number from {-MAX_REWARD:.0f} to {MAX_REWARD:.0f}",
    "rating": f"a whole number from {MIN_RATING} to {MAX_RATING}",
    "comment": f"1 to {MAX_COMMENT} characters",
}
"""Field of feedback, or ``$`` for all of it -> what it is to be."""

log = structlog.get_logger()


@dataclass(kw_only=True)
class Counts:
    """What has become of requests since the start."""

    requests: Counter[tuple[str, str, str]]
    """(arm, version, outcome) -> requests; arm and version are empty of those that came to none."""
    tokens: Counter[tuple[str, str]]
    """(arm, version) -> sampled tokens of answers."""
    num_feedback: int = 0
    num_mixed: int = 0
    """Answers with tokens of another version than their header's. There are to be none."""


class ServeApp:
    """The application."""

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        arms: Sequence[Arm],
        keyring: Keyring,
        recorder: Recorder,
        limits: AdmissionLimits,
    ) -> None:
        """Take ``name`` as that of the model whose traffic is split."""
        self._settings = settings
        self._name = name
        self._arms = {arm.name: arm for arm in arms}
        self._shares = [Share(arm.name, arm.share) for arm in arms]
        self._keyring = keyring
        self._recorder = recorder
        self._room = BodyBudget(limits)
        self._limits = limits
        self._feedback_limits = AdmissionLimits(max_body_bytes=MAX_FEEDBACK_BYTES)
        self._unsupported = Unsupported(settings.endpoint.on_unsupported)
        self._known: dict[str, str] = {}
        """Newest answers, oldest first, with the names of their clients' keys."""
        self._changed = Bell()
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics: ASGIApp | None = None
        """What answers ``/metrics``."""
        self.counts = Counts(requests=Counter(), tokens=Counter())
        self.num_answers = 0
        """Answers that are generated or wait."""
        self._num_of_key: Counter[str] = Counter()
        self.is_closing = False
        """Nothing more is taken on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = HttpRequest(scope, receive, send, {REQUEST_ID: f"req_{secrets.token_hex(12)}"})
        path = without_version(scope["path"])
        api = APIS.get(path)
        try:
            with attributed_to(Unexpected, "serve"):
                await self._route(path, api, request)
        except Refusal as refusal:
            if refusal.kind == "internal":
                log.exception("serve.unexpected", cause=refusal.message)
            arm, version = (request.headers.get(name, "") for name in (ARM, VERSION))
            self.counts.requests[arm, version, refusal.kind] += 1
            await self._refuse(refusal, api, request)

    async def wait_idle(self) -> None:
        """Wait until no answer is left."""
        while self.num_answers:
            await self._changed.wait()

    async def cut_off(self) -> int:
        """End all answers that have not ended, and tell those who wait; return how many there were."""
        num_left = len(self._tasks)
        for task in self._tasks:
            task.cancel()
        await self.wait_idle()
        return num_left

    async def _route(self, path: str, api: PostRoute | None, request: HttpRequest) -> None:
        if path == "health":
            check_method(request.scope, "GET")
            self._check_ready()
            await _reply({"status": "ok"}, request)
            return
        key = self._keyring.name_of(key_of(request.scope))
        if key is None:
            raise Refusal("unauthorized", "key: got none that is known here; send one as Authorization: Bearer KEY")
        if api is not None:
            check_method(request.scope, "POST")
            await self._take_on(api, key, request)
        elif path == "feedback":
            check_method(request.scope, "POST")
            await self._take_feedback(key, request)
        elif path == "models" or path.startswith("models/"):
            check_method(request.scope, "GET")
            await _reply(self._models(path.removeprefix("models").lstrip("/")), request)
        elif path == "metrics" and self.metrics is not None:
            await self.metrics(request.scope, request.receive, request.send)
        else:
            raise Refusal(
                "not_found", f"path: got {request.scope['path']!r:.200}, need one of {', '.join((*APIS, *OWN))}"
            )

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refusal):  # a client that has its answer is not told
            log.error("serve.failed", cause=f"{type(error).__name__}: {error}", exc_info=error)

    def _check_ready(self) -> None:
        down = [arm.name for arm in self._arms.values() if not arm.is_ready]
        if self.is_closing or down:
            raise Refusal("unavailable", "server: it ends" if self.is_closing else f"arms: {', '.join(down)} not ready")

    def _models(self, asked: str) -> dict[str, Any]:
        """Return what there is to say of the model whose traffic is split and of each arm; or of one of them."""
        whole = describe_model(self._name, self._name)
        arms = {
            arm.name: {**describe_model(arm.name, self._name), "version": arm.version, "share": arm.share}
            for arm in self._arms.values()
        }
        models = {self._name: whole, **arms}
        if not asked:
            return list_models(list(models.values()))
        return models.get(asked) or {**whole, "id": asked, "display_name": asked}  # it may be called by any name

    # Answers

    async def _take_on(self, api: PostRoute, key: str, request: HttpRequest) -> None:
        if self.is_closing:
            raise Refusal("unavailable", "server: it ends, and takes on nothing more; ask another one")
        with self.counted(key, 1):
            task = asyncio.create_task(self._serve(api, key, request))
            self._tasks.add(task)
            task.add_done_callback(self._end_task)
            await request.wait_for(task, lambda: Refusal("unavailable", "server: it has ended before the answer"))

    @contextmanager
    def counted(self, key: str, num_answers: int) -> Iterator[None]:
        """Count answers while the block lasts.

        Where there are several keys one may have as many as are still free: alone half of all, two a third each. So
        there is room for whoever comes, and none has to be reserved for keys that ask nothing.

        Raises:
            Refusal: there are too many, of all keys or of this one.
        """
        most, own = self._settings.serve.max_requests, self._num_of_key[key]
        free = most - self.num_answers
        if num_answers > free:
            raise Refusal("busy", f"requests: {self.num_answers} of {most} are answered or wait; come again later")
        if self._keyring.num_keys > 1 and own + num_answers > free - num_answers + 1:
            said = f"requests: {own} of this key and {self.num_answers} of {most} in all are answered or wait"
            raise Refusal("busy", f"{said}, and a key may have as many as are free; come again later")
        self.num_answers += num_answers
        self._num_of_key[key] += num_answers
        try:
            yield
        finally:
            self.num_answers -= num_answers
            self._num_of_key[key] -= num_answers
            self._num_of_key += Counter()  # keys without any go
            self._changed.ring()

    async def _serve(self, api: PostRoute, key: str, request: HttpRequest) -> None:
        """Read a request and answer it, within its deadline.

        Raises:
            Refusal: it is not answered.
        """
        answer = _Answer(self, api, key, request)
        deadline_s = self._settings.serve.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                async with self._room.holding(key, announced_bytes(request.scope, self._limits)) as shrink:
                    body = await request.read_body(self._limits)
                    if body is None:
                        return
                    shrink(len(body))
                    await answer.run(body)
        except TimeoutError:
            if not deadline.expired():
                raise
            with anyio.move_on_after(LATE_END_S):
                await answer.end_late(
                    Refusal("unavailable", f"answer: not over within serve.request_deadline_s = {deadline_s:g} s")
                )

    def assign(self, asked: Asked, origin: Origin) -> Arm:
        """Return the arm that answers a request, and note how that came."""
        origin.session = session_id(origin.key, asked.user) if asked.user else ""
        if asked.model in self._arms:
            origin.arm, origin.assigned = asked.model, "model"
        else:
            origin.arm = choose(self._shares, origin.session or secrets.token_hex(8))
            origin.assigned = "session" if origin.session else "share"
        return self._arms[origin.arm]

    def open(self, served: ServedVersion, name: str) -> tuple[RecordingPolicy, Session]:
        """Return a version's policy for one request, to be closed after it, and the session in which it answers."""
        sampling = self._settings.rollout.sampling
        policy = RecordingPolicy(
            served.client, served.codec, sampling, name=name, call_parser=served.client.call_parser
        )
        return policy, Session(policy, served.codec, limits=self._limits, unsupported=self._unsupported)

    async def note(self, exchange: ApiExchange, origin: Origin, served: ServedVersion, num_bytes: int) -> None:
        """Count an answer, and have it recorded unless it has broken off, as its client was told."""
        where = (origin.arm, served.version)
        self.counts.requests[*where, "answered" if exchange.replies else "broken"] += 1
        self.counts.tokens[where] += sum(reply.num_output_tokens for reply in exchange.replies)
        turns = [reply.turn for reply in exchange.replies if reply.turn is not None]
        if not all(is_of_one_version(turn, served) for turn in turns):
            self.counts.num_mixed += 1
            log.error("serve.mixed_versions", id=exchange.id, version=served.version)
        if not exchange.replies:
            return
        self._known[exchange.id] = origin.key
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        record = self._settings.serve.record
        if record == "nothing":
            return
        write = partial(lines_of, exchange, origin, served, has_tokens=record == "tokens")
        lines = await run_beside(lambda: list(write())) if num_bytes > LONG_BODY_BYTES else write()
        for line in lines:
            self._recorder.note(ANSWERS, line)

    # Feedback

    async def _take_feedback(self, key: str, request: HttpRequest) -> None:
        announced_bytes(request.scope, self._feedback_limits)
        body = await read_body(request.receive, self._feedback_limits)
        if body is None:
            return
        given = _read_feedback(body)
        values = msgspec.structs.asdict(given)
        self._recorder.note(FEEDBACK, FeedbackLine(**values, at=now(), key=key))
        self.counts.num_feedback += 1
        await _reply({"id": given.id, "object": "feedback", "is_known": self._known.get(given.id) == key}, request)

    # Refusals

    async def _refuse(self, refusal: Refusal, api: PostRoute | None, request: HttpRequest) -> None:
        error = (api.error if api else guess_error(request.scope))(refusal)
        headers = {**request.headers, "x-should-retry": "true" if refusal.kind in RETRIED else "false"}
        if refusal.kind in ("busy", "unavailable"):
            headers["retry-after"] = str(self._limits.draw_retry_after())
        if refusal.kind == "unauthorized":
            headers["www-authenticate"] = "Bearer"
        if refusal.kind == "too_slow":
            headers["connection"] = "close"  # the rest of the request would have to be read before another one
        response = json_response(error.body, status_code=error.status, headers=headers)
        await response(request.scope, request.receive, request.send)


class _Answer:
    """The answer to one request, from its body on."""

    def __init__(self, app: ServeApp, api: PostRoute, key: str, request: HttpRequest) -> None:
        self._app = app
        self._api = api
        self._request = request
        self._origin = Origin(api=api.name, key=key)
        self._exchange: ApiExchange | None = None

    async def run(self, body: bytes) -> None:
        """Have one version answer.

        Raises:
            Refusal: it does not.
        """
        request, origin = self._request, self._origin
        headers = Headers(scope=request.scope)
        asked = await read_beside(body, partial(read_asked, session=headers.get(SESSION, "")))
        arm = self._app.assign(asked, origin)
        async with arm.answering() as served:
            request.headers |= {ARM: arm.name, VERSION: served.version}
            policy, session = self._app.open(served, request.headers[REQUEST_ID])
            try:
                self._exchange = exchange = await parse_body(self._api, body, session)
                request.headers[REQUEST_ID] = exchange.id
                with self._app.counted(origin.key, exchange.call.n - 1), tracing.joining(headers):
                    await request.answer(session, exchange)
            finally:
                policy.close()
            if not exchange.call.is_counted:
                await self._app.note(exchange, origin, served, len(body))

    async def end_late(self, refusal: Refusal) -> None:
        """End an answer whose deadline is over: in the words of its API, also where it has begun.

        Raises:
            Refusal: it has not begun.
        """
        request, exchange = self._request, self._exchange
        if not request.has_begun or exchange is None:
            raise refusal
        self._app.counts.requests[self._origin.arm, request.headers[VERSION], refusal.kind] += 1
        if exchange.call.is_streamed:
            await request.send_events(exchange.fail(refusal))
            await request.end_events()


def _read_feedback(body: bytes) -> Feedback:
    try:
        given = msgspec.json.decode(body, type=Feedback)
    except msgspec.ValidationError as exc:
        raise Refusal("bad_request", f"feedback: {_plain_cause(str(exc))}") from exc
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise Refusal("bad_request", f"feedback: got what is no JSON object, need {_NEED['$']}") from exc
    if given.reward is None and given.rating is None and given.comment is None:
        raise Refusal("bad_request", "feedback: got an id alone, need a reward, a rating from 1 to 5 or a comment")
    return given


def _plain_cause(cause: str) -> str:
    """Say what feedback needs, by what msgspec says of it: ``Expected `int` <= 5 - at `$.rating```."""
    path = cause.rpartition("`$.")[2].rstrip("`") if "`$." in cause else ""
    if path in _NEED:
        return f"{path}: need {_NEED[path]}"
    if unknown := re.search(r"unknown field `(.*)`", cause):
        return f"got the field {escaped(unknown[1])[:MAX_CAUSE]!r}, need no other than {', '.join(list(_NEED)[1:])}"
    if "missing required field" in cause:
        return f"got no id, need {_NEED['id']}"
    return f"need {_NEED['$']}"


async def _reply(value: Mapping[str, Any], request: HttpRequest) -> None:
    await json_response(value, headers=request.headers)(request.scope, request.receive, request.send)
