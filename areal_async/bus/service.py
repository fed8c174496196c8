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
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
import msgspec
import nats.errors
import structlog
from nats.micro.request import Request, ServiceError
from nats.micro.service import EndpointStats, Service, ServiceConfig

import areal_async
from areal_async.bus.client import ASKER
from areal_async.bus.connection import ConnectionLostError, Handler, Received
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

    since_s, lags_s = time.monotonic(), deque([0.0], maxlen=NUM_BEATS)
    of_process = {"pid": os.getpid(), "host": socket.gethostname()}

    def whole_report() -> Report:
        up_s = round(time.monotonic() - since_s, 1)
        return {"loop_lag_max_s": round(max(lags_s), 4), **report(), **of_process, "up_s": up_s}

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
    with _noting_lags(lags_s):
        try:
            for endpoint in (own, *endpoints):
                await service.add_endpoint(
                    name=endpoint.name,
                    subject=endpoint.subject,
                    handler=partial(_handle, endpoint.answer),
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
    answers: asyncio.Queue[Received] = asyncio.Queue()
    with anyio.move_on_after(deadline_s):
        async with _hearing_answers(bus, answers.put_nowait) as send:
            await send(subject, msgspec.json.encode(body))
            answer = await answers.get()
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
    answers: asyncio.Queue[Received] = asyncio.Queue()
    with anyio.move_on_after(within_s), suppress(ConnectionLostError):
        async with _hearing_answers(bus, answers.put_nowait) as send:
            await send("$SRV.STATS")
            while (answer := await answers.get()).status is None:  # else nobody listens
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

    def on_received(answer: Received) -> None:
        if answer.status is None and (report := _report_in(answer, bus.names.run)) is not None:
            on_report(*report)

    async with _hearing_answers(bus, on_received) as send:
        yield partial(send, "$SRV.STATS")


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
async def _hearing_answers(bus: Bus, on_answer: Handler) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Hear the answers of services while the block runs; yields what sends a request, as ``Connection.publish``."""
    inbox = f"{SERVICES_INBOX}.{uuid4().hex}"
    async with bus.connection.listening(inbox, on_answer):
        yield partial(bus.connection.publish, reply=inbox)


def _is_request(request: Request) -> bool:
    """Say whether somebody asks, rather than the broker: what it sends for others says so, or waits for no answer.

    Where all roles are in one account, a request to the broker may have its answer sent to a service.
    """
    reply, headers = request._msg.reply, request.headers or {}
    return bool(reply) and not reply.startswith("$") and not SENT_BY_BROKER & headers.keys()


@contextmanager
def _noting_lags(lags_s: deque[float]) -> Iterator[None]:
    """Note, while the block runs, by how much this process's event loop is late at each beat."""
    loop = asyncio.get_running_loop()
    next_beat: asyncio.TimerHandle

    def beat(due_s: float) -> None:
        nonlocal next_beat
        lags_s.append(max(0.0, loop.time() - due_s))
        next_beat = loop.call_later(BEAT_S, beat, loop.time() + BEAT_S)

    next_beat = loop.call_later(BEAT_S, beat, loop.time() + BEAT_S)
    try:
        yield
    finally:
        next_beat.cancel()


async def _handle(answer: Callable[[Report], Awaitable[Report]], request: Request) -> None:
    if not _is_request(request):  # its sender chose where an answer would go
        log.warning("request.not_believed", subject=request.subject)
        return
    try:
        body = decode_json(request.data, Report, what=f"request to {request.subject}") if request.data else {}
        answered = await answer(body)
    except PipelineError as exc:
        raise ServiceError(REFUSED, " ".join(str(exc).split())) from exc
    await request.respond(msgspec.json.encode(answered))
