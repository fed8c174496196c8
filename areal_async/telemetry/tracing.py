"""Traces of what became of a prompt, recorded by every process for itself; nothing here knows a format or a collector.

    with tracing.span("publish trajectories", tracing.current(), kind=PRODUCER, attributes={...}) as span:
        span.note("areal.num_slots", 4)

Ids are derived, not carried: a group's trace and its first span follow from the run and the group's id, a held-out
row's from its evaluation's id and its index, a training step's from the version it makes. So nothing on the wire speaks
of traces; a ticket that is delivered again, a node or a trainer that is started again, land in the same trace; and
which groups and rows are recorded is decided alike everywhere.

Off, which it is until a process's main installs a recorder, every call here returns ``NOTHING`` or ``None`` at once.
Inside a process the span that something belongs to travels with the context, through the tasks that it starts.

Reasons may quote prompts and answers. Spans hold the kind of a failure, and its words only where texts are let in.
"""

import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from areal_async.errors import ArealError
from areal_async.protocol.types import Version

INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER = "internal", "server", "client", "producer", "consumer"
"""Kinds of spans, as OpenTelemetry names them."""
MAX_REASON_CHARACTERS = 500
_HALF = 1 << 64

Value = str | int | float | bool | list[str]
Attributes = Mapping[str, Value]


class SpanContext(NamedTuple):
    """Where a span stands: what others name as their parent, or link to."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """As a header of W3C Trace Context, recorded."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class Happening(NamedTuple):
    """A moment of a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """One stretch of time in a trace, recorded when its block ends. This one is not recorded."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def note(self, key: str, value: Value) -> None:
        """Set an attribute."""

    def happen(self, name: str, attributes: Attributes) -> None:
        """Note a moment of it."""

    def fail(self, kind: str, reason: str) -> None:
        """Say that it ended badly: which kind of failure it was, and, where texts are let in, its reason."""

    @property
    def age_s(self) -> float:
        """For how long it has been going on."""
        return 0.0


NOTHING = Span()


class RecordedSpan(Span):
    """One that is. Times are nanoseconds since 1970; its length is measured by a clock that nobody sets."""

    __slots__ = (
        "_began_ns", "_token", "attributes", "end_ns", "happenings", "kind", "links", "name", "parent", "place",
        "reason", "start_ns",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        place: SpanContext,
        parent: SpanContext | None,
        *,
        kind: str,
        attributes: Attributes,
        start_ns: int,
    ) -> None:
        self.name = name
        self.place = place
        self.parent = parent
        self.kind = kind
        self.attributes = dict(attributes)
        self.start_ns = start_ns
        self.end_ns = 0
        self.happenings: list[Happening] = []
        self.links: list[SpanContext] = []
        self.reason: str | None = None
        """How it ended badly: empty where texts are left out; None where it did not."""
        self._began_ns = time.monotonic_ns()
        self._token: Token[Span] | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        if error is not None:
            # Only our own errors are asked for their words: a user's may answer with another one.
            name = type(error).__name__
            self.fail(name, str(error) if isinstance(error, ArealError) else name)
        self.end(self.start_ns + time.monotonic_ns() - self._began_ns)

    def note(self, key: str, value: Value) -> None:
        self.attributes[key] = value

    def happen(self, name: str, attributes: Attributes) -> None:
        self.happenings.append(Happening(name, time.time_ns(), attributes))

    def fail(self, kind: str, reason: str) -> None:
        if self.reason is None:
            self.attributes["error.type"] = kind
            self.reason = reason[:MAX_REASON_CHARACTERS] if _has_texts else ""

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def end(self, end_ns: int) -> None:
        """Record it as over since ``end_ns``, which a foreign clock may put before its start."""
        self.end_ns = max(end_ns, self.start_ns)
        if _recorder is not None:
            _recorder.record(self)


class SpanRecorder(Protocol):
    """Where spans go. Called on event loops and in threads: it may neither wait nor raise."""

    def record(self, span: RecordedSpan) -> None: ...


_recorder: SpanRecorder | None = None
_run = ""
_ratio = 1.0
_has_texts = False
_current: ContextVar[Span] = ContextVar("areal_async_span", default=NOTHING)


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
    return _chosen("group", group_id)


def of_row(eval_id: str, index: int) -> SpanContext | None:
    """Return the first span of the trace of a held-out row in one evaluation; None where it is not recorded."""
    return _chosen("eval", f"{eval_id}.{index}")


def _chosen(kind: str, name: str) -> SpanContext | None:
    if _recorder is None:
        return None
    place = place_of(_run, kind, name)
    return place if is_chosen(place.trace_id, _ratio) else None


def of_step(version: Version) -> SpanContext | None:
    """Return the first span of the trace of the training step that makes ``version``; all of them are recorded.

    None for weights that no step has made.
    """
    return None if _recorder is None or version.step == 0 else place_of(_run, "step", str(version))


def place_of(run: str, kind: str, name: str) -> SpanContext:
    """Derive the trace of something in a run, and the first span of it."""
    digest = hashlib.blake2b("\0".join((run, kind, name)).encode(), digest_size=24).digest()
    return SpanContext(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1)  # zero is no id


def is_chosen(trace_id: int, ratio: float) -> bool:
    """Say whether a trace is among the recorded ones, as OpenTelemetry's ``TraceIdRatioBased`` does."""
    return trace_id % _HALF < round(ratio * _HALF)


def current() -> SpanContext | None:
    """Return the span that this code runs for; None where it is not recorded, or there is none."""
    span = _current.get()
    return span.place if isinstance(span, RecordedSpan) else None


def traceparent() -> str:
    """Return the header that tells a server which span it works for; empty for none."""
    place = current()
    return "" if place is None else place.traceparent


def current_span() -> Span:
    """As ``current``, for what is to be noted of it."""
    return _current.get()


def span(name: str, parent: SpanContext | None, *, kind: str = INTERNAL, attributes: Attributes) -> Span:
    """Return a span for a ``with`` block, which begins now; ``NOTHING`` where ``parent`` is not recorded."""
    if _recorder is None or parent is None:
        return NOTHING
    return RecordedSpan(name, _below(parent), parent, kind=kind, attributes=attributes, start_ns=time.time_ns())


def first_span(name: str, place: SpanContext | None, *, kind: str = INTERNAL, attributes: Attributes) -> Span:
    """As ``span``, for the first one of a trace, which is at ``place``."""
    if _recorder is None or place is None:
        return NOTHING
    return RecordedSpan(name, place, None, kind=kind, attributes=attributes, start_ns=time.time_ns())


def past(
    name: str,
    parent: SpanContext | None,
    *,
    start_ns: int,
    end_ns: int | None = None,
    kind: str = INTERNAL,
    attributes: Attributes,
    links: Iterable[SpanContext] = (),
    is_first: bool = False,
) -> Span:
    """Record a span that is over, since ``end_ns`` or now.

    Args:
        is_first: it is itself the one at ``parent``, the first of its trace.
    """
    if _recorder is None or parent is None:
        return NOTHING
    place, above = (parent, None) if is_first else (_below(parent), parent)
    made = RecordedSpan(name, place, above, kind=kind, attributes=attributes, start_ns=start_ns)
    made.links += links
    made.end(time.time_ns() if end_ns is None else end_ns)
    return made


def quoted(key: str, text: str) -> Attributes:
    """Return an attribute that may quote prompts and answers, or none where texts are left out."""
    return {key: text[:MAX_REASON_CHARACTERS]} if _has_texts else {}


def _below(parent: SpanContext) -> SpanContext:
    return SpanContext(parent.trace_id, random.getrandbits(64) or 1)


@contextmanager
def within(span: Span) -> Iterator[None]:
    """Run a block for a span that may be over already."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def wall_ns(monotonic_s: float) -> int:
    """Return when, in nanoseconds since 1970, this process's monotonic clock stood there."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
