"""The export of one process's spans to a collector, by OTLP over HTTP, or into a file (``trace_file``).

A recorded span goes into a bounded queue. A thread of its own translates what the queue holds, once a second or
sooner, and sends it; spans that find the queue full, and those that the collector did not take, are counted and logged.
Invariant: neither the event loop nor a training step nor the end of a process waits for a collector, but for the last
``CLOSE_DEADLINE_S``.
"""

import importlib.util
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from opentelemetry.trace import Status

from areal_async.config.metrics import TO_FILES, MetricsSettings
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.telemetry import tracing
from areal_async.telemetry.exporters.trace_file import FileExporter, sendable, sendable_text
from areal_async.telemetry.tracing import Attributes, RecordedSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
ROUTE = "/v1/traces"
SCOPE = "areal_async"
INTERVAL_S = 1.0
"""Longest wait of a span for others, in seconds: what a killed process loses."""
BATCH_SPANS = 512
MAX_SPANS = 16_384
"""Limit of the queue, some thirty megabytes."""
CLOSE_DEADLINE_S = 3.0
POLL_S = 0.05

log = structlog.get_logger()


@contextmanager
def recording(settings: Settings, run_directory: Path, *, role: str, instance: str = "0") -> Iterator[None]:
    """Record this process's spans while the block runs, where ``metrics.traces`` asks for it.

    Raises:
        UserError: the packages are not installed.
    """
    where = settings.metrics.traces
    if where is None:
        yield
        return
    check_installed(settings.metrics)
    resource = resource_of(settings.run.name, role=role, instance=instance)
    if where == TO_FILES:
        path = run_directory / "traces" / f"{role}-{instance}.jsonl"
        scope = {"name": SCOPE, "version": str(resource["service.version"])}
        outbox = SpanOutbox(FileExporter(path, resource, scope=scope), where=str(path))
    else:
        url = endpoint(where)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        outbox = SpanOutbox(SdkExporter(OTLPSpanExporter(endpoint=url), resource), where=url)
    metrics, run = settings.metrics, f"{settings.run.name}.{settings.metrics.traces_key}"
    tracing.install(outbox, run=run, ratio=metrics.traces_ratio, has_texts=metrics.traces_texts)
    try:
        yield
    finally:
        tracing.install(None)
        outbox.close()


def check_installed(metrics: MetricsSettings) -> None:
    """Check that the packages for ``metrics.traces`` are there; a file needs none.

    Raises:
        UserError: a package is missing.
    """
    with suppress(ModuleNotFoundError):  # of a package above them
        if metrics.traces in (None, TO_FILES) or all(importlib.util.find_spec(name) for name in PACKAGES):
            return
    raise UserError(
        f"metrics.traces: got {metrics.traces!r}, need the packages opentelemetry-sdk and "
        "opentelemetry-exporter-otlp-proto-http; pip install areal-async[traces], or set it to file"
    )


def with_key(settings: Settings, read_earlier: Callable[[], Settings] | None) -> Settings:
    """Return the settings with a ``metrics.traces_key``: that of the run's earlier start, where there was one.

    Without traces too: a later start, or a node that joins, may have some.
    """
    metrics = settings.metrics
    if metrics.traces_key:
        return settings
    key = (read_earlier().metrics.traces_key if read_earlier is not None else "") or secrets.token_hex(4)
    return settings.model_copy(update={"metrics": metrics.model_copy(update={"traces_key": key})})


def endpoint(url: str) -> str:
    """Return the URL that spans are posted to, given a collector's address with or without the route."""
    return url if url.rstrip("/").endswith(ROUTE) else url.rstrip("/") + ROUTE


def resource_of(run: str, *, role: str, instance: str) -> dict[str, str | int]:
    """Return the attributes of this process's resource."""
    return {
        "service.name": f"areal-{role}",
        "service.namespace": "areal",
        "service.instance.id": instance,
        "service.version": metadata.version("areal-async"),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "areal.run": run,
    }


class SpanOutbox:
    """The queue and its thread: a ``tracing.SpanRecorder``."""

    def __init__(self, exporter: "FileExporter | SdkExporter", *, where: str, max_spans: int = MAX_SPANS) -> None:
        self._exporter = exporter
        self._where = where
        self._max_spans = max_spans
        self._spans: deque[RecordedSpan] = deque()
        self._wake = threading.Event()
        self._num_sending = 0
        self._is_closing = False
        self._is_failing = False
        self._is_overflow_logged = False
        self.num_sent = 0
        self.num_dropped = 0
        """Spans that found the queue full."""
        self.num_refused = 0
        """Spans that the collector, or the disk, did not take."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def record(self, span: RecordedSpan) -> None:
        """Queue a span that is over."""
        if len(self._spans) >= self._max_spans:
            self.num_dropped += 1
            return
        self._spans.append(span)
        if len(self._spans) == BATCH_SPANS:
            self._wake.set()

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Send the rest of the queue within ``deadline_s``, unless it is refused, and log how many spans were lost."""
        self._is_closing = True
        self._wake.set()
        ends_at_s = time.monotonic() + deadline_s
        while self._thread.is_alive() and not self._exporter.is_in_trouble and time.monotonic() < ends_at_s:
            self._thread.join(POLL_S)
        self._exporter.shutdown()
        self._thread.join(POLL_S)
        num_lost = self.num_dropped + self.num_refused + self._num_sending + len(self._spans)
        if num_lost:
            log.warning("traces.lost", where=self._where, num_lost=num_lost, num_sent=self.num_sent)

    def _run(self) -> None:
        while True:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            while self._spans and not (self._is_closing and self._is_failing):
                self._send([self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))])
            self._log_overflow()
            if is_last:
                return

    def _send(self, spans: list[RecordedSpan]) -> None:
        self._num_sending = len(spans)
        try:
            self._exporter.export(spans)
        except OSError as exc:
            self.num_refused += len(spans)
            if not self._is_failing:
                log.warning("traces.not_sent", where=self._where, reason=str(exc), detail="the run goes on without")
            self._is_failing = True
        else:
            self.num_sent += len(spans)
            if self._is_failing:
                log.warning("traces.sent_again", where=self._where, num_lost=self.num_refused + self.num_dropped)
            self._is_failing = False
        self._num_sending = 0

    def _log_overflow(self) -> None:
        if self.num_dropped and not self._is_overflow_logged:
            self._is_overflow_logged = True
            log.warning(
                "traces.dropped",
                detail=f"more than {self._max_spans} spans wait to be sent: some are left out from now on; "
                "lower metrics.traces_ratio",
            )


class SdkExporter:
    """Any exporter of OpenTelemetry's SDK, given our spans as the SDK's, in the name of one process.

    Those over HTTP heed ``OTEL_EXPORTER_OTLP_*``: headers, certificates, compression, time.
    """

    def __init__(self, exporter: "SpanExporter", resource: Mapping[str, str | int]) -> None:
        """Take the process's resource; ``OTEL_RESOURCE_ATTRIBUTES`` add to it."""
        # Imported here and below: a process without traces never loads it.
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._scope = InstrumentationScope(SCOPE, str(resource["service.version"]))
        self._resource = Resource.create(resource)
        self._exporter = exporter
        self._failure = _FirstFailure()

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Send spans; it may wait.

        Raises:
            OSError: the collector did not take them.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export([self._translated(one) for one in spans])
        reason = self._failure.take()
        if result is not SpanExportResult.SUCCESS:
            raise OSError(reason)

    def _translated(self, span: RecordedSpan) -> "ReadableSpan":
        from opentelemetry.sdk.trace import Event, ReadableSpan

        status = span.status
        if status.description:
            status = Status(status.status_code, sendable_text(status.description))
        return ReadableSpan(
            sendable_text(span.name),
            context=span.context,
            parent=span.parent,
            resource=self._resource,
            attributes=_all_sendable(span.attributes),
            events=[Event(sendable_text(one.name), _all_sendable(one.attributes), one.time_ns) for one in span.events],
            links=span.links,
            kind=span.kind,
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    @property
    def is_in_trouble(self) -> bool:
        """Whether the current batch was refused and is tried again."""
        return bool(self._failure.reason)

    def shutdown(self) -> None:
        """Give up the current batch, and take no more."""
        self._exporter.shutdown()


def _all_sendable(attributes: Attributes) -> Attributes:
    return {sendable_text(key): sendable(value) for key, value in attributes.items()}


class _FirstFailure(logging.Handler):
    """The reason of a failed export, taken from the library's log records, which are kept from other logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reason = ""
        """Reason in the first record since ``take``; later records say that the batch was tried again."""
        logger = logging.getLogger("opentelemetry.exporter")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not self.reason:
            errors = [str(one) for one in record.args or () if isinstance(one, Exception)]
            # Of a chain of errors of three libraries, in one line, the last is the operating system's.
            self.reason = errors[0].rpartition(": ")[2].strip("()'\"") if errors else record.getMessage()

    def take(self) -> str:
        """Return the reason, and forget it."""
        reason, self.reason = self.reason, ""
        return " ".join(reason.split())
