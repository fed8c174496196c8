"""A process's spans reach a collector or a file, and nothing waits for either: a run is worth more than its traces."""

import base64
import functools
import json
import math
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import ValidationError
from structlog.testing import capture_logs

from areal_async.config.settings import MetricsSettings, RunSettings, Settings
from areal_async.doctor.preflight.exports import check_traces, check_trackers
from areal_async.doctor.preflight.findings import Level, guarded
from areal_async.errors import UserError
from areal_async.telemetry import tracing
from areal_async.telemetry.exporters.trace_file import FileExporter
from areal_async.telemetry.exporters.traces import (
    SdkExporter,
    SpanOutbox,
    endpoint,
    recording,
    resource_of,
    with_key,
)
from areal_async.telemetry.tracing import PRODUCER, of_group
from tests.collector import collecting, read

NOWHERE = "http://127.0.0.1:1"


def _settings(tmp_path: Path, **metrics: Any) -> Settings:
    return Settings(run=RunSettings(name="seen", directory=tmp_path), metrics=MetricsSettings(**metrics))


def _record(name: str = "work", **attributes: Any) -> None:
    with tracing.span(name, of_group("0-1-0"), kind=PRODUCER, attributes=attributes) as span:
        span.add_event("stream.broken", {"areal.server_id": "0-0"})


def _until(is_so: Callable[[], bool]) -> None:
    done = threading.Event()
    while not is_so():
        done.wait(0.01)


def test_what_a_process_recorded_is_at_the_collector_when_it_has_ended(tmp_path: Path) -> None:
    """Names, times, attributes, events and errors; and which process of which run it was."""
    with collecting() as collector:
        settings = _settings(tmp_path, traces=collector.url, traces_key="k", traces_texts=True)
        with recording(settings, tmp_path, role="node", instance="7"):
            _record(number=3, share=0.5, ids=["a", "b"])
            with pytest.raises(UserError), tracing.span("admit", of_group("0-1-0"), is_first=True, attributes={}):
                raise UserError("x: got y")

    work, admit = collector.spans
    assert (work.service, work.instance, work.name, work.kind) == ("areal-node", "7", "work", 4)
    assert work.attributes == {"number": 3, "share": 0.5, "ids": ["a", "b"]}
    assert work.events == [("stream.broken", {"areal.server_id": "0-0"})]
    assert (work.trace, work.parent, work.error) == (admit.trace, admit.id, "")
    assert (admit.parent, admit.error) == ("", "x: got y")
    assert 0 < work.start_ns <= work.end_ns
    place = tracing.derived("seen.k", "group", "0-1-0")
    assert (admit.trace, admit.id) == (f"{place.trace_id:032x}", f"{place.span_id:016x}")
    assert tracing.of_group("0-1-0") is None


def test_no_collector_is_two_sentences_and_no_traceback(tmp_path: Path) -> None:
    """That it is not there, and what was lost: the library's own account of each try is nobody's."""
    code = (
        "from pathlib import Path\n"
        "from areal_async.telemetry import log, tracing\n"
        "from areal_async.telemetry.exporters.traces import recording\n"
        "from areal_async.config.settings import MetricsSettings, Settings\n"
        "log.configure('node', None)\n"
        f"settings = Settings(metrics=MetricsSettings(traces='{NOWHERE}'))\n"
        "with recording(settings, Path('nowhere'), role='node'):\n"
        "    with tracing.span('work', tracing.of_group('0-1-0'), attributes={}):\n"
        "        pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (0, "")
    not_sent, lost = [line.partition("warning node: ")[2] for line in ended.stderr.splitlines()]
    where = f"where={NOWHERE}/v1/traces"
    assert not_sent == f"traces.not_sent {where} reason=[Errno 111] Connection refused detail=the run goes on without"
    assert lost == f"traces.lost {where} num_lost=1 num_sent=0"


def test_a_collector_that_refuses_is_told_of_once_and_so_is_its_return(tmp_path: Path) -> None:
    with collecting() as collector, capture_logs() as logs:
        outbox = SpanOutbox(
            SdkExporter(OTLPSpanExporter(endpoint(collector.url)), resource_of("r", role="node", instance="0")),
            where="",
        )
        tracing.install(outbox, run="r")
        for status, num_told in ((400, 1), (400, 1), (200, 2), (200, 2)):
            collector.status = status
            num_requests = collector.num_requests
            _record()
            _until(lambda before=num_requests: collector.num_requests > before)
            _until(lambda: outbox.num_refused + outbox.num_sent == collector.num_requests)
            assert len(logs) == num_told, logs
        tracing.install(None)
        outbox.close()

    first, again, lost = logs
    assert (first["event"], first["log_level"]) == ("traces.not_sent", "warning")
    assert "400" in first["reason"]
    assert (again["event"], again["num_lost"]) == ("traces.sent_again", 2)
    assert (lost["event"], lost["num_lost"], lost["num_sent"]) == ("traces.lost", 2, 2)


def test_a_collector_that_answers_nothing_costs_spans_and_no_time(tmp_path: Path) -> None:
    """The queue is bounded, what it has no room for is counted and told of, and the process ends all the same."""
    with collecting() as collector, capture_logs() as logs:
        collector.answers.clear()
        exporter = SdkExporter(OTLPSpanExporter(endpoint(collector.url)), resource_of("r", role="node", instance="0"))
        outbox = SpanOutbox(exporter, where="", max_spans=5)
        tracing.install(outbox, run="r")
        _record()
        _until(lambda: collector.num_requests == 1)  # and from now on the thread waits for its answer
        for _ in range(8):
            _record()
        tracing.install(None)
        outbox.close(deadline_s=0.05)

        assert outbox.num_dropped == 3
        (lost,) = [one for one in logs if one["event"] == "traces.lost"]
        assert lost["num_lost"] >= 8
        collector.answers.set()
        _until(lambda: not outbox._thread.is_alive())
    assert [one["event"] for one in logs].count("traces.dropped") == 1


def test_files_hold_what_collectors_import(tmp_path: Path) -> None:
    """Each line is an ExportTraceServiceRequest in OTLP's JSON, as OpenTelemetry's own reader of it finds."""
    run_directory = tmp_path / "seen"
    for _ in range(2):  # a process that is started again goes on in its file
        with recording(_settings(tmp_path, traces="file"), run_directory, role="trainer", instance="1"):
            _record(text="\ud800 half a character", number=3, is_so=True, share=0.5, ids=["a", "b"])

    lines = (run_directory / "traces" / "trainer-1.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    said = json.loads(lines[0])
    (span,) = said["resourceSpans"][0]["scopeSpans"][0]["spans"]
    place = tracing.derived("seen.", "group", "0-1-0")
    assert (span["traceId"], span["parentSpanId"]) == (f"{place.trace_id:032x}", f"{place.span_id:016x}")
    assert span["kind"] == 4
    for key in ("traceId", "spanId", "parentSpanId"):  # protobuf's own JSON has base64 there
        span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    (seen,) = read(ParseDict(said, ExportTraceServiceRequest()))
    assert (seen.service, seen.instance, seen.name) == ("areal-trainer", "1", "work")
    assert seen.attributes == {
        "text": "? half a character", "number": 3, "is_so": True, "share": 0.5, "ids": ["a", "b"],
    }  # fmt: skip
    assert seen.events == [("stream.broken", {"areal.server_id": "0-0"})]


def test_numbers_that_json_has_not_are_written_as_otlp_has_them(tmp_path: Path) -> None:
    with recording(_settings(tmp_path, traces="file"), tmp_path, role="node"):
        _record(nan=math.nan, more=math.inf, less=-math.inf, half=0.5)

    line = json.loads((tmp_path / "traces" / "node-0.jsonl").read_text())
    written = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
    assert [one["value"]["doubleValue"] for one in written] == ["NaN", "Infinity", "-Infinity", 0.5]


def test_a_line_is_in_the_file_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that fills up in the midst of one takes it back; after a process killed there, a new one begins."""
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b'{"resourceSpans": [{"of a kil')
    said = resource_of("r", role="node", instance="0")
    exporter = FileExporter(path, said, scope={"name": "s", "version": "1"})
    with capture_logs() as logs:
        outbox = SpanOutbox(exporter, where=str(path))
        tracing.install(outbox, run="r")
        for number, is_full in enumerate((False, True, False)):
            with _full_after(path.stat().st_size + 100) if is_full else nullcontext():
                _record(f"work {number}")
                _until(functools.partial(_are_told, outbox, number + 1))
        tracing.install(None)
        outbox.close()

    killed, *whole = path.read_text().splitlines()
    assert killed == '{"resourceSpans": [{"of a kil'
    names = [json.loads(one)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for one in whole]
    assert names == ["work 0", "work 2"]
    lost = [one for one in logs if one["event"] == "traces.lost"]
    assert [(one["num_lost"], one["num_sent"]) for one in lost] == [(1, 2)]


def _are_told(outbox: SpanOutbox, num_spans: int) -> bool:
    return outbox.num_sent + outbox.num_refused == num_spans


@contextmanager
def _full_after(num_bytes: int) -> Iterator[None]:
    """Let no file grow any further: the write that would is cut short, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_collector_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way of the folder")

    with capture_logs() as logs, recording(_settings(tmp_path, traces="file"), tmp_path, role="node"):
        _record()

    assert [one["event"] for one in logs] == ["traces.not_sent", "traces.lost"]


def test_without_the_extra_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, from ``doctor``, and from a process on a host that lacks it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    settings = _settings(tmp_path, traces=NOWHERE)

    with pytest.raises(
        UserError, match=r"metrics.traces: got 'http://127.0.0.1:1', need .*; pip install areal-async\[traces\]"
    ):
        with recording(settings, tmp_path, role="node"):
            pytest.fail("it goes on")
    (finding,) = guarded("traces", lambda: check_traces(settings))
    assert finding.level is Level.ERROR
    assert finding.cure == "pip install areal-async[traces], or set it to file"
    with recording(_settings(tmp_path, traces="file"), tmp_path, role="node"):
        _record()  # which needs no package


def test_doctor_finds_a_collector_that_is_not_there_and_a_tracker_without_its_package(tmp_path: Path) -> None:
    """Spans would be lost, which ends no run; a tracker without its package does."""
    with collecting() as collector:
        (there,) = check_traces(_settings(tmp_path, traces=collector.url))
    (gone,) = check_traces(_settings(tmp_path, traces=NOWHERE))
    (tracker,) = check_trackers(_settings(tmp_path, wandb_project="mine"))

    assert [one.level for one in (there, gone, tracker)] == [Level.GOOD, Level.WARNING, Level.ERROR]
    assert not [*check_traces(_settings(tmp_path)), *check_trackers(_settings(tmp_path))]


def test_a_run_keeps_the_key_of_its_traces_and_a_new_one_has_another(tmp_path: Path) -> None:
    """A backend may still hold those of the last run of this name."""
    settings = _settings(tmp_path, traces="file")
    first, other = with_key(settings, None), with_key(settings, None)

    assert first.metrics.traces_key != other.metrics.traces_key
    assert with_key(settings, lambda: first).metrics.traces_key == first.metrics.traces_key
    without = with_key(_settings(tmp_path), lambda: first)
    assert without.metrics.traces_key == first.metrics.traces_key, "a start without traces in between loses nothing"


@pytest.mark.parametrize(
    "traces",
    [
        "localhost:4318", "files", "grpc://host:4317", "", "http://", "http://:4318", "http://h:99999", "http://h:0",
        "http://h:port", "http://h:4318/?token=1", "https://h/v1/traces#now", "http://[::1",
    ],
)  # fmt: skip
def test_where_traces_go_is_a_collectors_address_or_a_file(traces: str) -> None:
    with pytest.raises(ValidationError, match="need file or the http"):
        MetricsSettings(traces=traces)


def test_the_route_is_added_to_an_address_without_it() -> None:
    assert {endpoint(url) for url in ("http://h:1", "http://h:1/", "http://h:1/v1/traces")} == {"http://h:1/v1/traces"}
