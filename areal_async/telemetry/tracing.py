"""Traces of what became of a prompt, recorded by every process for itself, in OpenTelemetry's contexts.

    with tracing.span("publish trajectories", tracing.current(), kind=PRODUCER, attributes={...}) as span:
        span.set_attribute("areal.num_slots", 4)

A span is OpenTelemetry's, and it is the current one of OpenTelemetry's context while its block runs, through the tasks
that it starts. So the spans that a user's workflow makes with an SDK of its own are below ours, and ours below theirs.
The recording is ours and not the SDK's: a trace file needs no SDK, and the SDK lets nobody choose a span's id.

Ids are derived, not carried: a group's trace and its first span follow from the run and the group's id, a held-out
row's from its evaluation's id and its index, a training step's from the version it makes. So no message between our
processes speaks of traces; a ticket that is delivered again, a node or a trainer that is started again, land in the
same trace; and which groups and rows are recorded is decided alike everywhere.

Off, which it is until a process's main installs a recorder, every call here returns ``NOTHING`` or ``None`` at once.

Reasons may quote prompts and answers. Spans hold the kind of a failure, and its words only where texts are let in.
"""

import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AnyValue

from areal_async.errors import ArealError
from areal_async.protocol.types import Version

INTERNAL, CLIENT, PRODUCER, CONSUMER = SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.PRODUCER, SpanKind.CONSUMER
NOTHING = trace.INVALID_SPAN
"""A span that is not recorded."""
MAX_REASON_CHARACTERS = 500
_HALF = 1 << 64
_PROPAGATOR = TraceContextTextMapPropagator()

Attributes = Mapping[str, AnyValue]


class SpanEvent(NamedTuple):
    """A moment of a span, in nanoseconds since 1970."""

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(eq=False, repr=False)
class RecordedSpan(Span):
    """A stretch of time in a trace, recorded when its block ends; what a user's code reaches as the current span.

    Times are nanoseconds since 1970; the length is measured by a clock that nobody sets.
    """

    name: str
    context: SpanContext
    parent: SpanContext | None
    kind: SpanKind
    attributes: dict[str, AnyValue]
    start_ns: int
    links: list[Link]
    end_ns: int = 0
    events: list[SpanEvent] = field(default_factory=list)
    status: Status = field(default_factory=Status)
    """An error's description is empty where texts are left out."""
    _began_ns: int = field(default_factory=time.monotonic_ns)
    _token: Token[Context] | None = None

    def __enter__(self) -> Self:
        self._token = context.attach(trace.set_span_in_context(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            context.detach(self._token)
        if error is not None:
            # Only our own errors are asked for their words: a user's may answer with another one.
            name = type(error).__name__
            fail(self, name, str(error) if isinstance(error, ArealError) else name)
        self.end()

    @property
    def age_s(self) -> float:
        """Time since it began."""
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return not self.end_ns

    def update_name(self, name: str) -> None:
        self.name = name

    def set_attribute(self, key: str, value: AnyValue) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Attributes) -> None:
        self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes | None = None, timestamp: int | None = None) -> None:
        self.events.append(SpanEvent(name, timestamp or time.time_ns(), attributes or {}))

    def add_link(self, context: SpanContext, attributes: Attributes | None = None) -> None:
        self.links.append(Link(context, attributes))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        self.add_event("exception", {"exception.type": type(exception).__name__, **(attributes or {})}, timestamp)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        code, text = (status.status_code, status.description) if isinstance(status, Status) else (status, description)
        is_quoted = code is StatusCode.ERROR and _has_texts
        self.status = Status(code, (text or "")[:MAX_REASON_CHARACTERS] if is_quoted else None)

    def end(self, end_time: int | None = None) -> None:
        """Record it as over since ``end_time`` or now; a foreign clock may put that before its start."""
        if self.end_ns:
            return
        end_ns = self.start_ns + time.monotonic_ns() - self._began_ns if end_time is None else end_time
        self.end_ns = max(end_ns, self.start_ns)
        if _recorder is not None:
            _recorder.record(self)


class SpanRecorder(Protocol):
    """A sink of spans, called on event loops and in threads: it may neither wait nor raise."""

    def record(self, span: RecordedSpan) -> None: ...


_recorder: SpanRecorder | None = None
_run = ""
_ratio = 1.0
_has_texts = False


def install(recorder: SpanRecorder | None, *, run: str = "", ratio: float = 1.0, has_texts: bool = False) -> None:
    """Record from now on, or, given None, no more.

    Args:
        run: tells the ids of one run from those of another.
        ratio: share of groups, and of held-out rows, that are recorded.
        has_texts: let in reasons, which may quote prompts and answers.
    """
    global _recorder, _run, _ratio, _has_texts
    _recorder, _run, _ratio, _has_texts = recorder, run, ratio, has_texts


def is_on() -> bool:
    """Say whether anything is recorded."""
    return _recorder is not None


def of_group(group_id: str) -> SpanContext | None:
    """Return the first span of a group's trace; None where it is not recorded."""
    return _sampled("group", group_id)


def of_row(eval_id: str, index: int) -> SpanContext | None:
    """Return the first span of the trace of a held-out row in one evaluation; None where it is not recorded."""
    return _sampled("eval", f"{eval_id}.{index}")


def of_step(version: Version) -> SpanContext | None:
    """Return the first span of the trace of the training step that makes ``version``; all of them are recorded.

    None for weights that no step has made.
    """
    return None if _recorder is None or version.step == 0 else derived(_run, "step", str(version))


def _sampled(kind: str, name: str) -> SpanContext | None:
    if _recorder is None:
        return None
    first = derived(_run, kind, name)
    return first if is_sampled(first.trace_id, _ratio) else None


def derived(run: str, kind: str, name: str) -> SpanContext:
    """Derive the trace of something in a run, and the first span of it: another process may record that one."""
    digest = hashlib.blake2b("\0".join((run, kind, name)).encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1  # zero is no id
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Say whether a trace is among the recorded ones, as OpenTelemetry's ``TraceIdRatioBased`` does."""
    return trace_id % _HALF < round(ratio * _HALF)


def current() -> SpanContext | None:
    """Return the span that this code runs for, ours or a user's; None where it is not recorded, or there is none."""
    if _recorder is None:
        return None
    found = trace.get_current_span().get_span_context()
    return found if found.trace_flags.sampled else None


def current_span() -> Span:
    """Return our span that this code runs for; ``NOTHING`` where there is none."""
    found = NOTHING if _recorder is None else trace.get_current_span()
    return found if isinstance(found, RecordedSpan) else NOTHING


def headers() -> dict[str, str]:
    """Return W3C's headers, which tell a server which span, ours or a user's, it works for; none for none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


@contextmanager
def joining(carrier: Mapping[str, str]) -> Iterator[None]:
    """Answer a request for the span that its W3C headers name, unless what this code runs for is in another trace."""
    found = trace.get_current_span(_PROPAGATOR.extract(carrier))
    own_id = trace.get_current_span().get_span_context().trace_id
    is_joined = own_id in (0, found.get_span_context().trace_id)
    with trace.use_span(found) if is_joined else nullcontext():
        yield


def span(
    name: str,
    parent: SpanContext | None,
    *,
    kind: SpanKind = INTERNAL,
    attributes: Attributes,
    start_ns: int | None = None,
    links: Iterable[SpanContext] = (),
    is_first: bool = False,
) -> Span:
    """Return a span for a ``with`` block, begun at ``start_ns`` or now; ``NOTHING`` where ``parent`` is not recorded.

    One that is over already is recorded by its ``end``, with the time of that.

    Args:
        is_first: it is itself the one at ``parent``, the first of its trace.
    """
    if _recorder is None or parent is None:
        return NOTHING
    ids, above = (parent, None) if is_first else (_below(parent), parent)
    start_ns = time.time_ns() if start_ns is None else start_ns
    return RecordedSpan(name, ids, above, kind, dict(attributes), start_ns, [Link(one) for one in links])


def fail(span: Span, kind: str, reason: str) -> None:
    """Say that a span ended badly, if nothing has said so: which kind of failure, and, where texts are let in, why."""
    if isinstance(span, RecordedSpan) and span.status.is_unset:
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, reason)


def quoted(key: str, text: str) -> Attributes:
    """Return an attribute that may quote prompts and answers, or none where texts are left out."""
    return {key: text[:MAX_REASON_CHARACTERS]} if _has_texts else {}


def _below(parent: SpanContext) -> SpanContext:
    return SpanContext(parent.trace_id, random.getrandbits(64) or 1, False, parent.trace_flags, parent.trace_state)


def wall_ns(monotonic_s: float) -> int:
    """Return when, in nanoseconds since 1970, this process's monotonic clock stood there."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
