"""A terminal emulator with ``top`` in it, or a shell to start it from."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

from tests.e2e.test_run import REPOSITORY

SHOWN_WITHIN_S = 60.0
TOP = (sys.executable, "-m", "areal_async", "top")
SHELL = ("sh", "-c", "exec sh -i </proc/self/fd/0")
"""Opens the terminal anew, which makes it the one whose keys stop and end the shell's jobs."""
ALTERNATE_SCREEN = 1049 << 5
"""As pyte numbers the terminal's private modes."""


class Terminal:
    """A terminal of a fixed size with a program in it, which ends with the terminal."""

    def __init__(
        self, size: tuple[int, int], *words: str, program: Sequence[str] = TOP, directory: Path = REPOSITORY
    ) -> None:
        columns, rows = size
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._file, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [*program, *words], cwd=directory, stdin=own, stdout=own,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        os.close(own)

    @property
    def lines(self) -> list[str]:
        return list(self._screen.display)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_taken(self) -> bool:
        """Whether a program has the whole screen, and hides the cursor."""
        return ALTERNATE_SCREEN in self._screen.mode and self._screen.cursor.hidden

    @property
    def is_as_before(self) -> bool:
        """Whether none has."""
        return ALTERNATE_SCREEN not in self._screen.mode and not self._screen.cursor.hidden

    def resize(self, columns: int, rows: int) -> None:
        """As a user drags the window's corner."""
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """As a user closes the window; the program is not told, as one that `nohup` has started."""
        os.close(self._file)

    def press(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def read(self, for_s: float = 0.1) -> None:
        ends_at = time.monotonic() + for_s
        while (left_s := ends_at - time.monotonic()) > 0:
            if select.select([self._file], [], [], left_s)[0]:
                try:
                    self._stream.feed(os.read(self._file, 65536))
                except OSError:  # it has ended
                    return

    def wait(self, is_so: Callable[[str], bool], what: str, *, within_s: float = SHOWN_WITHIN_S) -> float:
        """Return after how long it stood there."""
        since_s = time.monotonic()
        while not is_so(self.text):
            assert time.monotonic() < since_s + within_s, f"not shown within {within_s:g} s: {what}\n{self.text}"
            self.read()
        return time.monotonic() - since_s

    def wait_ended(self, *, within_s: float) -> int:
        """Return the program's status. What it says is read until then: it could not end in the middle of a screen."""
        ends_at = time.monotonic() + within_s
        while (status := self.process.poll()) is None:
            assert time.monotonic() < ends_at, f"not over within {within_s:g} s\n{self.text}"
            self.read()
        return status
