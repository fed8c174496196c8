"""The terminal that ``top`` is in: its keys, its screen, and giving both back.

Invariant: whenever this process is stopped from its keyboard (Ctrl-Z) or has ended, by SIGTERM too, the shell finds
the terminal as it was: lines are edited and seen as they are typed, and the text above is there again, and the cursor.
"""

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import anyio
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live

ESCAPES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\t": "right",
    "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*[@-~]|O[@-~])")


class TopTerminal:
    """A terminal of one's own while the block runs: every key at once and unseen, and the whole screen."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._before: list[Any] = []
        """Its modes, as they are when it is given back."""

    def __enter__(self) -> Self:
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        # The terminal's own word: LINES and COLUMNS may be inherited from another one, and do not follow it.
        with suppress(OSError):
            self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        return self._console.size

    def show(self, lines: Sequence[RenderableType]) -> None:
        """Draw these, as many as the screen has."""
        self._live.update(Group(*lines), refresh=True)

    async def keys(self) -> AsyncIterator[str]:
        """Yield each key that is pressed, by its letter or its name; ends with the input."""
        file = sys.stdin.fileno()
        while True:
            await anyio.wait_readable(file)
            if not select.select([file], [], [], 0)[0]:
                continue  # stopped meanwhile: what was typed is gone, or was the shell's
            text = os.read(file, 64).decode(errors="replace")
            if not text:
                return
            for key in keys_in(text):
                yield key

    async def run_stops(self, *, on_return: Callable[[], None]) -> None:
        """Give the terminal back whenever this process is stopped or ended, take it again when it goes on, for ever.

        Args:
            on_return: the terminal is ours again, with nothing on its screen.
        """
        while True:
            with anyio.open_signal_receiver(signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM) as signals:
                stop = await anext(signals)
            # Here each does what it does to any process. In the background, where `bg` sends it, the terminal's modes
            # are not ours to set: the first try stops this process again.
            self._give_back()
            if stop != signal.SIGCONT:
                signal.raise_signal(stop)
            self._take()
            on_return()

    def _take(self) -> None:
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self._live.start()

    def _give_back(self) -> None:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        self._live.stop()


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys whose codes these are, by letter or name; one without a name here, such as Delete, is none."""
    while text:
        sequence = _SEQUENCE.match(text)
        code = sequence[0] if sequence is not None else text[0]
        if sequence is None or code in ESCAPES:
            yield ESCAPES.get(code, code)
        text = text[len(code) :]
