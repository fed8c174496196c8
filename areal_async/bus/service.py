"""A role as a NATS micro service: any NATS client finds it, asks what it does, and gives it orders.

Discovery (``$SRV.PING``, ``$SRV.INFO``, ``$SRV.STATS``) is the client library's. Every service is named
``areal-<role>``, tells its run and its instance as metadata, and answers at ``areal.<run>.status.<role>.<instance>``;
what it answers there also stands in its statistics, so that one request finds and asks all. ``$SRV.INFO`` has the JSON
Schemas of each endpoint's request and response as metadata; a refusal is an answer without a body, its reason in the
header ``Nats-Service-Error``, and is counted as an error with that reason.

Source: NATS ADR-32, "Service API".
"""

import asyncio
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio
import msgspec
import nats.errors
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream
from nats.micro.request import Request, ServiceError
from nats.micro.service import EndpointStats, Service, ServiceConfig

import areal_async
from areal_async.bus.client import ASKER
from areal_async.bus.connection import ConnectionLostError, Received
from areal_async.bus.jetstream import Bus
from areal_async.bus.permissions import SERVICES_INBOX, Role
from areal_async.errors import PipelineError, UnansweredError, UserError, WireError
from areal_async.protocol.subjects import Names
from areal_async.protocol.wire import decode_json

Report = dict[str, Any]
"""The status of a process, in JSON's types."""
Schema = dict[str, Any]
"""A JSON Schema."""

STOP_DEADLINE_S = 2.0
BEAT_S, NUM_BEATS = 0.2, 50
REFUSED = "400"
SENT_BY_BROKER = frozenset({"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Status"})
"""Headers of what it reads for somebody, delivers, or remarks."""
OF_PROCESSES = frozenset(Role) - {Role.OPERATOR}
"""Services that are processes; what servers do stands in their node's report too."""

log = structlog.get_logger()


class _EndpointStatistics(msgspec.Struct):
    name: str
    data: Report | None = None


class _Statistics(msgspec.Struct):
    """What a service answers to ``$SRV.STATS``, as far as it is read. Anybody may say so who may answer."""

    name: str
    metadata: dict[str, str]
    endpoints: list[_EndpointStatistics]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceEndpoint:
    """A subject where a service takes requests."""

    name: str
    subject: str
    description: str
    request: Schema
    response: Schema
    answer: Callable[[Report], Awaitable[Report]]
    """Takes the request's JSON object, empty for an empty request. Raises PipelineError to refuse it."""


@asynccontextmanager
async def serving(
    bus: Bus,
    *,
    description: str,
    report: Callable[[], Report],
    kind: str | None = None,
    instance: str = "0",
    endpoints: Sequence[ServiceEndpoint] = (),
) -> AsyncIterator[None]:
    """Answer as this role's service while the block runs, through restarts of the broker.

    Args:
        report: called for each question what the process does now; it must not block or raise. Which process it is
            on which host, for how long it has served, and by how much its loop was late at most in the last ten
            seconds, is added.
        kind: of service; by itself the role. A node also speaks for its servers, each a service ``areal-server``.
        endpoints: besides ``status``, which every service has.
    """

    async def status(_: Report) -> Report:
        return whole_report()

    def statistics(stats: EndpointStats) -> Report | None:
        # The library writes it with a plain encoder, which knows no records, and writes what is no number as no JSON.
        return msgspec.json.decode(msgspec.json.encode(whole_report())) if stats.name == "status" else None

    since_s, lag = time.monotonic(), _LoopLag()
    of_process = {"pid": os.getpid(), "host": socket.gethostname()}

    def whole_report() -> Report:
        up_s = round(time.monotonic() - since_s, 1)
        return {"loop_lag_max_s": round(lag.max_s, 4), **report(), **of_process, "up_s": up_s}

    kind = kind or bus.role
    subject = bus.names.status(kind, instance)
    own = ServiceEndpoint(
        name="status",
        subject=subject,
        description="what this process does now",
        request=json_object(),
        response=json_object(pid="integer", host="string", up_s="number", loop_lag_max_s="number"),
        answer=status,
    )
    await bus.api.wait_connected(bus.api.retry(f"service {kind}"))
    service = Service(
        bus.connection.client,
        ServiceConfig(
            name=f"areal-{kind}",
            version=areal_async.__version__,
            description=description,
            metadata={"run": bus.names.run, "instance": instance},
            stats_handler=statistics,
        ),
    )
    lag.start()
    try:
        for endpoint in (own, *endpoints):
            await service.add_endpoint(
                name=endpoint.name,
                subject=endpoint.subject,
                handler=_handler(endpoint),
                metadata={
                    "description": endpoint.description,
                    "request_schema": json.dumps(endpoint.request),
                    "response_schema": json.dumps(endpoint.response),
                },
            )
        # After the endpoints, so that all who find it can ask it.
        with suppress(nats.errors.Error):  # it subscribes first; if the connection then breaks, that is made up for
            await service.start()
        await bus.api.ask("$JS.API.INFO")  # answered after the broker has seen the subscriptions
        yield
    finally:
        lag.stop()
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True), suppress(nats.errors.Error):
            await service.stop()


def json_object(*, optional: Sequence[str] = (), **kinds: str | Schema) -> Schema:
    """Return the schema of an object that has these keys, each of this kind, and may have others."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in kinds.items()}
    required = [key for key in properties if key not in optional]
    return {"type": "object", "properties": properties, "required": required}


async def ask_service(bus: Bus, subject: str, body: Mapping[str, Any], *, deadline_s: float) -> Report:
    """Return a service's answer.

    Raises:
        UserError: it refuses, with its reason.
        UnansweredError: nobody answers.
    """
    run = bus.names.run
    with anyio.move_on_after(deadline_s):
        async with _requested(bus, subject, msgspec.json.encode(body)) as answers:
            async for answer in answers:
                if answer.status is not None:
                    raise UnansweredError(
                        f"run {run}: nobody takes orders there; start the run, or wait for its controller"
                    )
                refusal = answer.headers.get("Nats-Service-Error")
                if refusal is not None:
                    raise UserError(refusal)
                return decode_json(answer.data, Report, what=f"answer of {subject}")
    raise UnansweredError(
        f"run {run}: no answer at {subject} within {deadline_s:g} s, and it may still be obeyed; "
        f"status --run {run} tells who is there"
    )


async def gather_reports(bus: Bus, *, within_s: float) -> dict[tuple[str, str], Report]:
    """Ask every process of this run what it does; return {(role, instance): report} of those that answer in time."""
    found: dict[tuple[str, str], Report] = {}
    with anyio.move_on_after(within_s), suppress(ConnectionLostError):
        async with _requested(bus, "$SRV.STATS") as answers:
            async for answer in answers:
                if answer.status is not None:
                    break  # nobody listens
                if (report := _report_in(answer, bus.names.run)) is not None:
                    found[report[0]] = report[1]
    return found


@asynccontextmanager
async def hearing_reports(
    bus: Bus, on_report: Callable[[tuple[str, str], Report], None]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Hear what every service of this run answers, whenever it does, while the block runs; yields what asks them.

    Args:
        on_report: takes (role, instance), and the report.

    Raises:
        ConnectionLostError: by what asks, while the connection is down.
    """
    inbox = f"{SERVICES_INBOX}.{uuid4().hex}"

    def on_received(answer: Received) -> None:
        if answer.status is None and (report := _report_in(answer, bus.names.run)) is not None:
            on_report(*report)

    async def ask() -> None:
        await bus.connection.publish("$SRV.STATS", b"", reply=inbox)

    listener = await bus.connection.listen(inbox, on_received)
    try:
        yield ask
    finally:
        with anyio.CancelScope(shield=True):
            await listener.aclose()


def _report_in(answer: Received, run: str) -> tuple[tuple[str, str], Report] | None:
    """Return which process of this run answers, and what; None for anything else."""
    with suppress(WireError):  # another program's service
        stats = decode_json(answer.data, _Statistics, what="statistics of a service")
        role, instance = stats.name.removeprefix("areal-"), stats.metadata.get("instance")
        if stats.metadata.get("run") == run and role in OF_PROCESSES and _speaks_as(role, answer, run):
            for one in stats.endpoints:
                if one.name == "status" and one.data is not None and instance is not None:
                    return (role, instance), one.data
    return None


def _speaks_as(role: str, answer: Received, run: str) -> bool:
    """Say whether an answer is not another role's, as far as the broker tells: where each has its account, it does."""
    told = decode_json(answer.headers.get(ASKER, "{}").encode(), dict[str, Any], what=ASKER)
    speaker = told.get("svc") or told.get("acc")  # of what has come through several, the first is anybody's word
    return speaker not in {Names(run).account(other) for other in OF_PROCESSES - {role}}


@asynccontextmanager
async def _requested(
    bus: Bus, subject: str, payload: bytes = b""
) -> AsyncIterator[MemoryObjectReceiveStream[Received]]:
    """Send a request, and have its answers while the block runs.

    Raises:
        ConnectionLostError: not connected.
    """
    inbox = f"{SERVICES_INBOX}.{uuid4().hex}"
    send, receive = anyio.create_memory_object_stream[Received](math.inf)
    listener = await bus.connection.listen(inbox, send.send_nowait)
    try:
        with receive:
            await bus.connection.publish(subject, payload, reply=inbox)
            yield receive
    finally:
        with anyio.CancelScope(shield=True):
            await listener.aclose()
            send.close()


def _is_request(request: Request) -> bool:
    """Say whether somebody asks, rather than the broker: what it sends for others says so, or waits for no answer.

    Where all roles are in one account, a request to the broker may have its answer sent to a service.
    """
    reply, headers = request._msg.reply, request.headers or {}
    return bool(reply) and not reply.startswith("$") and not SENT_BY_BROKER & headers.keys()


class _LoopLag:
    """The delays of this process's event loop, lately."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque([0.0], maxlen=NUM_BEATS)
        self._next: asyncio.TimerHandle | None = None

    @property
    def max_s(self) -> float:
        return max(self._lags_s)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(BEAT_S, self._beat, loop, loop.time() + BEAT_S)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._lags_s.append(max(0.0, loop.time() - due_s))
        self._next = loop.call_later(BEAT_S, self._beat, loop, loop.time() + BEAT_S)


def _handler(endpoint: ServiceEndpoint) -> Callable[[Request], Awaitable[None]]:
    async def handle(request: Request) -> None:
        if not _is_request(request):  # its sender chose where an answer would go
            log.warning("request.not_believed", subject=request.subject)
            return
        try:
            body = decode_json(request.data, Report, what=f"request to {request.subject}") if request.data else {}
            answer = await endpoint.answer(body)
        except PipelineError as exc:
            raise ServiceError(REFUSED, " ".join(str(exc).split())) from exc
        await request.respond(msgspec.json.encode(answer))

    return handle
