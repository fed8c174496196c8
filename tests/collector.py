"""A collector of OTLP over HTTP, as far as tests need one: it parses what it is sent with OpenTelemetry's protobufs."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import create_server
from typing import Any

import uvicorn
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_async.process.http_server import GuestServer


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A span as it arrived. Ids are hexadecimal; ``parent`` is empty for the first one of a trace."""

    service: str
    instance: str
    trace: str
    id: str
    parent: str
    name: str
    kind: int
    attributes: Mapping[str, Any]
    events: list[tuple[str, Mapping[str, Any]]]
    links: list[tuple[str, str]]
    error: str
    start_ns: int
    end_ns: int


@dataclass
class Collector:
    """What has arrived, and how it answers."""

    url: str
    spans: list[Seen] = field(default_factory=list)
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    num_requests: int = 0

    def traces(self) -> dict[str, list[Seen]]:
        """Return the spans of each trace."""
        found: dict[str, list[Seen]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace, []).append(span)
        return found

    async def take(self, request: Request) -> Response:
        body = await request.body()
        self.num_requests += 1
        await asyncio.to_thread(self.answers.wait)
        if self.status == 200:
            self.spans += read(ExportTraceServiceRequest.FromString(body))
        return Response(b"", status_code=self.status, media_type="application/x-protobuf")


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector beside the test."""
    listening = create_server(("127.0.0.1", 0))
    collector = Collector(f"http://127.0.0.1:{listening.getsockname()[1]}")
    collector.answers.set()
    app = Starlette(routes=[Route("/v1/traces", collector.take, methods=["POST"])])
    server = GuestServer(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.should_exit = True
        thread.join()
        listening.close()


def read(request: ExportTraceServiceRequest) -> list[Seen]:
    """Return the spans of a request."""
    seen = []
    for resource in request.resource_spans:
        of_process = _values(resource.resource.attributes)
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            seen.append(
                Seen(
                    service=of_process["service.name"],
                    instance=of_process["service.instance.id"],
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    kind=span.kind,
                    attributes=_values(span.attributes),
                    events=[(one.name, _values(one.attributes)) for one in span.events],
                    links=[(one.trace_id.hex(), one.span_id.hex()) for one in span.links],
                    error=span.status.message if span.status.code == 2 else "",
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                )
            )
    return seen


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
