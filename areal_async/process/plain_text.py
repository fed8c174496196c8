"""Text of others in logs and on terminals: what would act there, as escapes do, is seen instead.

Users' code, models and servers write what they like. Anyone who looks at a log with ``cat`` or ``tail`` has a terminal
that obeys: it moves the cursor, changes the title, writes over what was said before.
"""

import io
import os
import re
import stat
import sys
from pathlib import Path

_ACTING = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"
    r"|[\u061c\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""Control characters but the tabulator and the end of a line; marks of direction, other line ends, half characters."""


def escaped(text: str) -> str:
    r"""Return text in which these are written as ``\x1b`` and ``\u009b``.

    JSON stays the same JSON: it writes the first kind as escapes itself, and the second kind is its own notation.
    """
    return _ACTING.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def read_tail(path: Path, *, start_bytes: int, max_bytes: int) -> str:
    """Return what a file has from ``start_bytes`` on, the end of it where that is long.

    Nothing where it is gone; all of it where it was made again since, and is shorter than that.
    """
    try:
        with open(path, "rb") as file:
            end_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(start_bytes if start_bytes <= end_bytes else 0, end_bytes - max_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


class PlainStream(io.TextIOWrapper):
    """Writes lines to an open file, escaped, at once; makes the file again where it was taken away.

    What cannot be written, as on a full disk, is left out: the process that prints goes on.
    """

    def __init__(self, number: int, path: Path) -> None:
        """Take the number of the open file, and where it is."""
        super().__init__(
            io.FileIO(number, "w", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._number = number
        self._path = path

    def write(self, text: str, /) -> int:
        try:
            if not os.fstat(self._number).st_nlink:
                replace_open_file(self._number, self._path)
            super().write(escaped(text))
        except OSError:
            pass
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def replace_open_file(number: int, path: Path) -> None:
    """Have an open file, whose name is gone, be the one of that name that is made now.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(exist_ok=True)
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(made, number)
    os.close(made)


def keep_output_plain() -> None:
    """Have all that this process prints from now on escaped, where its output goes to a file."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
            status = os.fstat(number)
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
        except (AttributeError, OSError):  # there is none; or a kernel that does not tell
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink:
            stream.flush()
            setattr(sys, name, PlainStream(number, path))
