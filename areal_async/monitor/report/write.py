"""Writing a run's report, once or again and again while the run lives."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.output import check_place, replacing
from areal_async.monitor.report.data import StepLines, read_report
from areal_async.monitor.report.page import render
from areal_async.monitor.trajectory_sources import ask_untrained, load_decoder
from areal_async.process.stdio import say

LOOK_S = 0.2
"""Seconds between two looks at a live run's files."""
REFRESH_S = 0.5
"""Seconds between two looks of a watched page at its file."""
ASK_EVERY_S = 30.0
"""Seconds between two questions to the broker of a watched live run; so often too is looked whether one lives again."""


def write_report(
    directory: RunDirectory, path: Path, *, is_watched: bool, pause: Callable[[float], object] = time.sleep
) -> None:
    """Write the report; with ``is_watched`` again whenever a step or an evaluation has ended, until interrupted.

    Args:
        pause: called between two looks with how long to wait, in seconds.

    Raises:
        UserError: it cannot be written.
    """
    check_place("--html", path)
    settings, decoder = directory.read_settings(), load_decoder(directory)
    untrained, steps = _Untrained(directory), StepLines(directory.path)
    seen: tuple[int, ...] | None = None
    while True:
        now = (untrained.num_changes, *_look(directory.path))
        if now != seen:
            lines, entries = steps.read(), untrained.entries
            data = read_report(settings, directory.path, lines=lines, decoder=decoder, untrained=entries)
            with replacing("--html", path) as temporary:
                temporary.write_text(render(data, refresh_s=REFRESH_S if is_watched else None), encoding="utf-8")
            if seen is None:
                say(f"report of {len(data.lines)} steps written to {path}, {path.stat().st_size / 1e3:.0f} kB")
            seen = now
        if not is_watched:
            return
        untrained.renew()
        pause(LOOK_S)


class _Untrained:
    """What the run's broker says of what was not trained. Of a long run it says much: the steps do not wait for it.

    To ask a run that is over means to hold its directory and to start a broker, so it is asked once, at its end.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._is_noted = False
        self._was_live = directory.is_live
        self._looked_s = time.monotonic()
        self._asking: threading.Thread | None = None
        self.num_changes = 0
        """How often ``entries`` have become others."""
        self.entries = ask_untrained(directory, note=self._note)

    def renew(self) -> None:
        """Ask a live run anew now and then, beside the caller; where there is no answer, the last one stands."""
        is_asking = self._asking is not None and self._asking.is_alive()
        is_due = time.monotonic() - self._looked_s >= ASK_EVERY_S
        if is_asking or not (self._was_live or is_due):
            return
        was_live, self._was_live = self._was_live, self._directory.is_live
        if is_due:
            self._looked_s = time.monotonic()
        if was_live != self._was_live or (is_due and self._was_live):
            self._asking = threading.Thread(target=self._ask, name="untrained", daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        entries = ask_untrained(self._directory, note=self._note)
        if entries and entries != self.entries:
            self.entries = entries
            self.num_changes += 1

    def _note(self, text: str) -> None:
        if not self._is_noted:
            self._is_noted = True
            sys.stderr.write(text)


def _look(run_directory: Path) -> tuple[int, ...]:
    """Return what changes with every step and evaluation."""
    paths = (run_directory / name for name in ("metrics.jsonl", "eval.jsonl"))
    states = [path.stat() for path in paths if path.exists()]
    return tuple(number for state in states for number in (state.st_ino, state.st_size))
