"""Reading a file of JSON lines while another process writes it.

A restored trainer replaces ``metrics.jsonl`` by the part that survives; the reader then starts over and says so.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

BLOCK_BYTES = 64 << 10
"""Read at once from a file's end: some lines of a step."""


class News(NamedTuple):
    """What has come since the last look."""

    lines: list[Line]
    is_from_start: bool
    """``lines`` replace all earlier ones."""


class JsonLines:
    """One reader of one file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0

    def read_new(self) -> News:
        """Return the whole lines that were added; a last line without its end waits for it."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                is_from_start = status.st_ino != self._inode or status.st_size < self._read_bytes
                self._inode = status.st_ino
                self._read_bytes = 0 if is_from_start else self._read_bytes
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return News([], is_from_start=False)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return News(_decode(whole), is_from_start)


def read_json_lines(path: Path) -> list[Line]:
    """Return every whole line of a file; none when it is not there."""
    return JsonLines(path).read_new().lines


def read_last_json_line(path: Path) -> Line | None:
    """Return the last whole line of a file, however long the file is; None when there is none."""
    try:
        with open(path, "rb") as file:
            end = place = file.seek(0, os.SEEK_END)
            while place > 0:
                place = max(0, place - max(BLOCK_BYTES, end - place))  # twice as much each time
                file.seek(place)
                lines = _decode(_whole_lines(file.read(end - place), is_from_start=place == 0))
                if lines:
                    return lines[-1]
    except FileNotFoundError:
        return None
    return None


def _whole_lines(data: bytes, *, is_from_start: bool) -> bytes:
    start = 0 if is_from_start else data.find(b"\n") + 1
    return data[start : data.rfind(b"\n") + 1]


def _decode(data: bytes) -> list[Line]:
    lines = []
    for text in data.splitlines():
        line = decode_object(text)
        if line is not None:  # else cut short by a crash of its writer
            lines.append(line)
    return lines


def decode_object(data: bytes) -> Line | None:
    """Return a JSON object (numbers may be NaN, as a diverged run writes them); None for anything else."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
