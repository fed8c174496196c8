"""What a process says on stdout, for as long as that can be written.

A run goes on without its reader, which may end as ``head`` does, be a closed terminal or a full disk. What is
said then goes nowhere, which is told once; most of it stands in the run's logs too.
"""

import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from areal_async.process.plain_text import escaped

SCRIPT = "areal-async"
"""The command that an installation puts beside ``python``."""
STDIN, STDOUT, STDERR = 0, 1, 2

_losses: list[OSError] = []


def program() -> str:
    """Return how this program was called: by the installed command, whatever its file is called, or as a module."""
    return SCRIPT if Path(sys.argv[0]).name.startswith(SCRIPT) else "python -m areal_async"


def say(line: str) -> None:
    """Write one line, now: a pipe sees it as soon as a terminal would. Nothing in it acts on the terminal."""
    _write(sys.stdout, escaped(line) + "\n")


class LossyStdout(io.TextIOBase):
    """A stream that is stdout, for who draws on it: as with ``say``, writing never fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        _write(self._stream, text)
        return len(text)


def loss() -> OSError | None:
    """Return what first kept stdout from being written; None where all that was said is written."""
    _write(sys.stdout, "")
    return _losses[0] if _losses else None


def open_missing_streams() -> None:
    """Open those of stdin, stdout and stderr onto nothing that this process was started without.

    Call before anything else is opened. A socket would get the number of the first that is missing, and then be what
    children take for theirs; libuv aborts over it.
    """
    for number in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(nowhere, True)
    sys.stdin = sys.stdin or open(STDIN, closefd=False)
    sys.stdout = sys.stdout or open(STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or open(STDERR, "w", closefd=False)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as exc:
        _fall_silent(exc)


def _fall_silent(cause: OSError) -> None:
    """Have what is still written to stdout go nowhere; else Python complains of it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)
    _losses.append(cause)
    level = logging.INFO if isinstance(cause, BrokenPipeError) else logging.WARNING  # a reader may have had enough
    logging.getLogger("areal_async").log(
        level, "stdout: got %s, need what can be written; what is said from here on goes nowhere", cause.strerror
    )
