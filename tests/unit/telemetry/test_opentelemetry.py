"""Our spans and those of a user's own OpenTelemetry SDK are one tree, and every exporter takes ours."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, Tracer, TraceState

from areal_async.telemetry import tracing
from areal_async.telemetry.exporters.trace_file import FileExporter
from areal_async.telemetry.exporters.traces import SdkExporter, SpanOutbox, resource_of
from areal_async.telemetry.tracing import RecordedSpan, of_group

RESOURCE = resource_of("seen", role="node", instance="0")


class Theirs:
    """What a user has set up: a tracer, and where its spans come out."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = provider.get_tracer("a user's")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {one.name: one for one in self.exporter.get_finished_spans()}


class Ours:
    """A recorder."""

    def __init__(self) -> None:
        self.all: list[RecordedSpan] = []

    def record(self, span: RecordedSpan) -> None:
        self.all.append(span)

    @property
    def spans(self) -> dict[str, RecordedSpan]:
        return {one.name: one for one in self.all}


@pytest.fixture
def theirs() -> Theirs:
    return Theirs()


@pytest.fixture
def ours() -> Iterator[Ours]:
    tracing.install(ours := Ours(), run="seen")
    yield ours
    tracing.install(None)


@pytest.mark.anyio
async def test_a_users_span_is_below_ours_and_ours_below_it_through_tasks(theirs: Theirs, ours: Ours) -> None:
    async def call() -> None:
        await anyio.lowlevel.checkpoint()
        with tracing.span("completion", tracing.current(), attributes={}):
            await anyio.lowlevel.checkpoint()

    with tracing.span("workflow", of_group("0-1-0"), is_first=True, attributes={}):
        with theirs.tracer.start_as_current_span("retrieve"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)

    retrieve = theirs.spans["retrieve"]
    assert retrieve.parent == ours.spans["workflow"].context
    assert ours.spans["completion"].parent == retrieve.context
    assert retrieve.context is not None
    assert retrieve.context.trace_id == ours.spans["completion"].context.trace_id


def test_a_span_below_one_that_a_user_does_not_record_is_not_recorded_either(ours: Ours) -> None:
    unsampled = NonRecordingSpan(SpanContext(7, 8, False, TraceFlags(0)))
    with trace.use_span(unsampled), tracing.span("completion", tracing.current(), attributes={}) as span:
        assert span is tracing.NOTHING

    assert not ours.spans


def test_servers_are_told_of_a_users_span_though_we_record_nothing(theirs: Theirs) -> None:
    with theirs.tracer.start_as_current_span("answer") as span:
        found = span.get_span_context()
        flags = f"{found.trace_flags:02x}"
        assert tracing.headers() == {"traceparent": f"00-{found.trace_id:032x}-{found.span_id:016x}-{flags}"}
        tracing.current_span().add_event("stream.begun", {})

    assert not theirs.spans["answer"].events, "what we did not record is not said in the user's spans instead"


def test_a_state_that_a_trace_was_begun_with_is_passed_on(ours: Ours) -> None:
    above = SpanContext(7, 8, True, TraceFlags(1), TraceState([("vendor", "what")]))
    with trace.use_span(NonRecordingSpan(above)), tracing.span("completion", tracing.current(), attributes={}):
        assert tracing.headers()["tracestate"] == "vendor=what"


def test_a_request_is_answered_for_its_callers_span_in_our_trace_alone(ours: Ours) -> None:
    """An agent's client that is traced says whom it asks for; one with a trace of its own takes nothing out of ours."""
    workflow = of_group("0-1-0")
    assert workflow is not None
    callers = (f"{workflow.trace_id:032x}", f"{7:032x}", "what no trace is")
    with tracing.span("workflow", workflow, is_first=True, attributes={}):
        for trace_id in callers:
            with tracing.joining({"traceparent": f"00-{trace_id}-{8:016x}-01"}):
                with tracing.span("completion", tracing.current(), attributes={}):
                    pass
    with tracing.joining({"traceparent": f"00-{callers[1]}-{8:016x}-01"}):
        found = tracing.current()

    parents = [one.parent.span_id for one in ours.all if one.parent is not None]
    assert parents == [8, workflow.span_id, workflow.span_id]
    assert found is not None
    assert (found.trace_id, found.span_id) == (7, 8), "no trace of ours is left by it"


@pytest.mark.parametrize("has_texts", [False, True])
def test_a_workflow_reaches_our_span_as_the_current_one(*, has_texts: bool) -> None:
    """It may add to it, and end it badly once; what an exception says is let in with the other texts alone."""
    tracing.install(ours := Ours(), run="seen", has_texts=has_texts)
    try:
        with tracing.span("workflow", of_group("0-1-0"), is_first=True, attributes={"a": 1}):
            span = trace.get_current_span()
            span.set_attributes({"user.documents": 3})
            span.add_event("retrieved", {"user.index": "wiki"}, 12)
            span.add_link(SpanContext(7, 8, True))
            span.record_exception(ValueError("what the model wrote"))
            span.set_status(StatusCode.ERROR, "what the model wrote")
            span.update_name("renamed")
            span.end()
    finally:
        tracing.install(None)

    (only,) = ours.all
    assert (only.name, only.attributes) == ("renamed", {"a": 1, "user.documents": 3})
    retrieved, exception = only.events
    assert retrieved == ("retrieved", 12, {"user.index": "wiki"})
    assert exception.attributes == {"exception.type": "ValueError"}
    assert [one.context.trace_id for one in only.links] == [7]
    assert only.status.status_code is StatusCode.ERROR
    assert only.status.description == ("what the model wrote" if has_texts else None)


def test_any_exporter_of_the_sdk_takes_our_spans() -> None:
    exporter = InMemorySpanExporter()
    outbox = SpanOutbox(SdkExporter(exporter, RESOURCE), where="memory")
    tracing.install(outbox, run="seen", has_texts=True)
    with tracing.span(
        "workflow", of_group("0-1-0"), kind=tracing.PRODUCER, is_first=True, attributes={"a": 1}
    ) as first:
        tracing.fail(first, "failed", "half \ud800")
        with tracing.span("completion", tracing.current(), attributes={}) as span:
            span.add_event("stream.begun", {"areal.server_id": "0-0"})
    tracing.install(None)
    outbox.close()

    completion, workflow = exporter.get_finished_spans()
    assert workflow.context == completion.parent == tracing.derived("seen", "group", "0-1-0")
    assert (workflow.kind, workflow.attributes, workflow.parent) == (
        tracing.PRODUCER,
        {"a": 1, "error.type": "failed"},
        None,
    )
    assert (workflow.status.status_code, workflow.status.description) == (StatusCode.ERROR, "half ?")
    assert workflow.resource.attributes["service.name"] == "areal-node"
    ((name, attributes),) = [(one.name, one.attributes) for one in completion.events]
    assert (name, attributes) == ("stream.begun", {"areal.server_id": "0-0"})


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_what_a_workflow_says_of_our_span_cannot_end_the_exporting(tmp_path: Path) -> None:
    """Neither into a file nor to a collector: a value that OTLP has no place for is its type's name there."""
    hostile: dict[str, Any] = {
        "object": Hostile(),
        "large": 1 << 80,
        "none": None,
        "map": {"a": 1},
        "list": (1, Hostile()),
    }
    path, exporter = tmp_path / "traces.jsonl", InMemorySpanExporter()
    for sink in (FileExporter(path, RESOURCE, scope={"name": "s", "version": "1"}), SdkExporter(exporter, RESOURCE)):
        outbox = SpanOutbox(sink, where="here")
        tracing.install(outbox, run="seen")
        with tracing.span("workflow", of_group("0-1-0"), is_first=True, attributes={}):
            trace.get_current_span().set_attributes(hostile)
        tracing.install(None)
        outbox.close()
        assert (outbox.num_sent, outbox.num_refused) == (1, 0)

    (line,) = path.read_text().splitlines()
    (span,) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    said = {one["key"]: one["value"] for one in span["attributes"]}
    assert (said["object"], said["large"]) == ({"stringValue": "Hostile"}, {"stringValue": "int"})
    assert said["list"] == {"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "Hostile"}]}}
    assert encode_spans(exporter.get_finished_spans()).ByteSize() > 0
