"""Spans in a file of lines, each an ``ExportTraceServiceRequest`` in OTLP's JSON: what collectors write and read.

Written here rather than by OpenTelemetry's packages, whose way there costs ten times as much of a processor that the
process has other use for; a laptop needs none of them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id
from opentelemetry.util.types import AnyValue

from areal_async.telemetry.tracing import Attributes, RecordedSpan

NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class FileExporter:
    """A file with a line per batch."""

    is_in_trouble = False
    """Always false: nothing is tried again."""

    def __init__(self, path: Path, resource: Attributes, *, scope: Mapping[str, str]) -> None:
        """Take the attributes of the process, and the name and version of the library that makes the spans."""
        self._path = path
        self._resource = {"attributes": _attributes(resource)}
        self._scope = scope

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Append one line with these spans.

        Raises:
            OSError: the file cannot be written.
        """
        request = {
            "resourceSpans": [
                {
                    "resource": self._resource,
                    "scopeSpans": [{"scope": self._scope, "spans": [_span(span) for span in spans]}],
                }
            ]
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _append(self._path, msgspec.json.encode(request) + b"\n")

    def shutdown(self) -> None:
        """Do nothing: no file is held open."""


def _append(path: Path, line: bytes) -> None:
    """Write a line whole or not at all, and apart from the half of one that a killed process left."""
    with open(path, "a+b", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        file.seek(max(start - 1, 0))
        left = line if file.read(1) in (b"", b"\n") else b"\n" + line
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(start)
            raise


def sendable(value: AnyValue) -> AnyValue:
    """Return an attribute's value as every collector takes it; of another type, which a user's may be, its type's name.

    Models write halves of characters, which errors quote and no UTF-8 is for; integers have 64 bits.
    """
    match value:
        case str():
            return sendable_text(value)
        case bool() | float():
            return value
        case int() if -(1 << 63) <= value < 1 << 63:
            return value
        case list() | tuple():
            return [sendable(one) for one in value]
        case _:
            return type(value).__name__


def sendable_text(text: str) -> str:
    return text if type(text) is str and text.isascii() else text.encode(errors="replace").decode()


def _span(span: RecordedSpan) -> dict[str, Any]:
    fields: dict[str, Any] = {
        **_ids(span.context),
        "name": sendable_text(span.name),
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.context.trace_state:
        fields["traceState"] = span.context.trace_state.to_header()
    if span.parent is not None:
        fields["parentSpanId"] = format_span_id(span.parent.span_id)
    if span.events:
        fields["events"] = [
            {
                "timeUnixNano": str(one.time_ns),
                "name": sendable_text(one.name),
                "attributes": _attributes(one.attributes),
            }
            for one in span.events
        ]
    if span.links:
        fields["links"] = [_ids(one.context) for one in span.links]
    if not span.status.is_unset:
        fields["status"] = {
            "code": span.status.status_code.value,
            "message": sendable_text(span.status.description or ""),
        }
    return fields


def _ids(context: SpanContext) -> dict[str, str]:
    return {"traceId": format_trace_id(context.trace_id), "spanId": format_span_id(context.span_id)}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": sendable_text(key), "value": _value(sendable(value))} for key, value in attributes.items()]


def _value(value: AnyValue) -> dict[str, Any]:
    match value:
        case str():
            return {"stringValue": value}
        case bool():
            return {"boolValue": value}
        case float():
            return {"doubleValue": value if math.isfinite(value) else NOT_IN_JSON[str(value)]}
        case list():
            return {"arrayValue": {"values": [_value(one) for one in value]}}
        case _:
            return {"intValue": str(value)}  # 64 bits, which not every reader of JSON has
