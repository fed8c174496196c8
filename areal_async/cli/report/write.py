"""Writing a run's report, once or again and again while the run lives."""

import time
from datetime import UTC, datetime
from pathlib import Path

from areal_async.cli.report.data import StepLines, read_report
from areal_async.cli.report.page import render
from areal_async.cli.speech import say
from areal_async.cli.trajectories import ask_untrained, load_decoder
from areal_async.launch.run_directory import RunDirectory

LOOK_S = 0.2
"""Between two looks at a live run's files."""
REFRESH_S = 0.5
"""Between two looks of a watched page at its file."""
ASK_EVERY_S = 30.0
"""Between two questions to the broker of a run that is watched."""


def write_report(directory: RunDirectory, path: Path, *, is_watched: bool) -> None:
    """Write the report; with ``is_watched`` again whenever a step or an evaluation has ended, until interrupted."""
    settings, decoder = directory.read_settings(), load_decoder(directory)
    untrained, steps = ask_untrained(directory), StepLines(directory.path)
    asked_at = time.monotonic()
    seen: tuple[int, ...] | None = None
    while True:
        now = _look(directory.path)
        if now != seen:
            if time.monotonic() - asked_at >= ASK_EVERY_S:
                untrained, asked_at = ask_untrained(directory), time.monotonic()
            at = datetime.now(UTC).astimezone()
            data = read_report(
                settings, directory.path, lines=steps.read(), decoder=decoder, untrained=untrained, now=at
            )
            _replace(path, render(data, refresh_s=REFRESH_S if is_watched else None))
            if seen is None:
                say(f"report of {len(data.lines)} steps written to {path}, {path.stat().st_size / 1e3:.0f} kB")
            seen = now
        if not is_watched:
            return
        time.sleep(LOOK_S)


def _look(run_directory: Path) -> tuple[int, ...]:
    """Return what changes with every step and evaluation."""
    found: list[int] = []
    for name in ("metrics.jsonl", "eval.jsonl"):
        path = run_directory / name
        if path.exists():
            state = path.stat()
            found += [state.st_ino, state.st_size]
    return tuple(found)


def _replace(path: Path, text: str) -> None:
    """Write under another name and rename: a browser never reads half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
