"""Spans in a file of lines, each an ``ExportTraceServiceRequest`` in OTLP's JSON: what collectors write and read.

Written here rather than by OpenTelemetry's packages, whose way there costs ten times as much of a processor that the
process has other use for; a laptop needs none of them.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_async.telemetry.tracing import CLIENT, CONSUMER, INTERNAL, PRODUCER, SERVER, Attributes, RecordedSpan, Value

KINDS = {INTERNAL: 1, SERVER: 2, CLIENT: 3, PRODUCER: 4, CONSUMER: 5}
ERROR = 2
NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class FileExporter:
    """Appends a line per batch."""

    is_in_trouble = False
    """Nothing is tried again."""

    def __init__(self, path: Path, resource: Attributes, *, scope: Mapping[str, str]) -> None:
        """Take what is said of the process, and of the library that its spans are of."""
        self._path = path
        self._resource = {"attributes": _attributes(resource)}
        self._scope = scope

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Write them.

        Raises:
            OSError: the file cannot be written.
        """
        said = {
            "resourceSpans": [
                {
                    "resource": self._resource,
                    "scopeSpans": [{"scope": self._scope, "spans": [_span(span) for span in spans]}],
                }
            ]
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _append(self._path, msgspec.json.encode(said) + b"\n")

    def shutdown(self) -> None:
        """Nothing is held."""


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


def sendable(text: str) -> str:
    """Return text without what no UTF-8 is for: models write halves of characters, which errors quote."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _span(span: RecordedSpan) -> dict[str, Any]:
    said: dict[str, Any] = {
        "traceId": f"{span.place.trace_id:032x}",
        "spanId": f"{span.place.span_id:016x}",
        "name": sendable(span.name),
        "kind": KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent is not None:
        said["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.happenings:
        said["events"] = [
            {"timeUnixNano": str(one.at_ns), "name": one.name, "attributes": _attributes(one.attributes)}
            for one in span.happenings
        ]
    if span.links:
        said["links"] = [{"traceId": f"{one.trace_id:032x}", "spanId": f"{one.span_id:016x}"} for one in span.links]
    if span.reason is not None:
        said["status"] = {"code": ERROR, "message": sendable(span.reason)}
    return said


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case str():
            return {"stringValue": sendable(value)}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}  # 64 bits, which not every reader of JSON has
        case float():
            return {"doubleValue": value if math.isfinite(value) else NOT_IN_JSON[str(value)]}
        case _:
            return {"arrayValue": {"values": _values(value)}}


def _values(values: Iterable[Value]) -> list[dict[str, Any]]:
    return [_value(one) for one in values]
