"""Reading a file of JSON lines while another process writes it.

A restored trainer replaces ``metrics.jsonl`` by the part that survives; the reader then says how much that is. It keeps
eight bytes of each line that it has read, and not the line.
"""

import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

BLOCK_BYTES = 64 << 10
"""Read at once from a file's end: some lines of a step."""


class News(NamedTuple):
    """What has come since the last look."""

    lines: list[Line]
    """Lines that were not there before, oldest first."""
    num_kept: int
    """Lines read before that the file still begins with; any others were taken back."""


class JsonLines:
    """One reader of one file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self._digests = array("q")
        """Hash of each line that was handed out."""

    def read_new(self) -> News:
        """Return the whole lines that were added; a last line without its end waits for it."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                is_replaced = status.st_ino != self._inode or status.st_size < self._read_bytes
                self._inode = status.st_ino
                self._read_bytes = 0 if is_replaced else self._read_bytes
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return News([], len(self._digests))
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        texts = iter(whole.splitlines())
        if is_replaced:
            texts = self._after_same(texts)
        num_kept, lines = len(self._digests), []
        for text, line in _decoded(texts):
            self._digests.append(hash(text))
            lines.append(line)
        return News(lines, num_kept)

    def _after_same(self, texts: Iterator[bytes]) -> Iterator[bytes]:
        """Pass over the lines that were handed out before; forget those that are not there any more."""
        num_same = 0
        for text in texts:
            if num_same < len(self._digests) and hash(text) == self._digests[num_same]:
                num_same += 1
            elif decode_object(text) is not None:
                texts = itertools.chain([text], texts)
                break
        del self._digests[num_same:]
        return texts


def read_json_lines(path: Path) -> list[Line]:
    """Return every whole line of a file; none when it is not there."""
    return list(json_lines(path))


def json_lines(path: Path) -> Iterator[Line]:
    """Yield every whole line of a file, however long the file is; none when it is not there."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in _decoded(file):
            yield line


def read_last_json_line(path: Path) -> Line | None:
    """Return the last whole line of a file, however long the file is; None when there is none."""
    try:
        with open(path, "rb") as file:
            end, num_bytes = file.seek(0, os.SEEK_END), BLOCK_BYTES
            while True:
                start = file.seek(max(0, end - num_bytes))
                data = file.read(end - start)
                first = data.find(b"\n") + 1 if start else 0
                lines = [line for _, line in _decoded(data[first : data.rfind(b"\n") + 1].splitlines())]
                if lines or not start:
                    return lines[-1] if lines else None
                num_bytes *= 2
    except FileNotFoundError:
        return None


def _decoded(texts: Iterable[bytes]) -> Iterator[tuple[bytes, Line]]:
    for text in texts:
        line = decode_object(text)
        if line is not None:  # else cut short by a crash of its writer
            yield text, line


def decode_object(data: bytes) -> Line | None:
    """Return a JSON object (numbers may be NaN, as a diverged run writes them); None for anything else."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
