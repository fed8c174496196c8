"""A run's files followed onto boards: each line of ``metrics.jsonl``, ``eval.jsonl`` and ``arms.jsonl``, once.

The launcher does it, which outlives every other process: boards show what the files say, also after a restart. Boards
that cannot be written, as on a full disk, are given up with a warning: they never end a run.
"""

from array import array
from contextlib import suppress

import anyio
import anyio.to_thread
import structlog

from areal_async.config.settings import Settings
from areal_async.process.json_lines import JsonLines, Line
from areal_async.protocol.types import Version
from areal_async.telemetry.exporters.curves import Curves
from areal_async.versions.arms import FILE

INTERVAL_S = 2.0

log = structlog.get_logger()


class BoardWriter:
    """Writes onto the boards of a run what its files have gained, and knows what is written already."""

    def __init__(self, settings: Settings) -> None:
        directory = settings.run_directory
        self._curves = Curves(settings, directory)
        self._steps_file = JsonLines(directory / "metrics.jsonl")
        self._evaluations_file = JsonLines(directory / "eval.jsonl")
        self._arms_file = JsonLines(directory / FILE)
        self._told_steps = array("q")
        """The training step of each line that the boards were given."""
        self._is_given_up = False

    async def run(self) -> None:
        """Follow until cancelled, beside the event loop: a board may lie on a slow disk."""
        while True:
            await anyio.to_thread.run_sync(self.catch_up)
            await anyio.sleep(INTERVAL_S)

    def catch_up(self) -> None:
        """Tell the boards what the files have gained."""
        if self._is_given_up:
            return
        try:
            self._tell()
        except OSError as exc:
            self._is_given_up = True
            log.warning("curves.given_up", cause=str(exc), cure="the next start of the run writes them whole")

    def close(self) -> None:
        """Tell the last of it."""
        self.catch_up()
        with suppress(OSError):
            self._curves.close()

    def _tell(self) -> None:
        news = self._steps_file.read_new()
        if news.num_kept < len(self._told_steps):
            del self._told_steps[news.num_kept :]
            self._curves.rewind(to_step=self._told_steps[-1] if self._told_steps else 0)
        for line in news.lines:
            self._curves.add(line, step=_step(line))
            self._told_steps.append(_step(line))
        for line in self._evaluations_file.read_new().lines:
            self._curves.add(
                {"accuracy": line.get("accuracy"), "num_failed": line.get("num_failed")}
                | {f"pass@{size}": chance for size, chance in (line.get("pass_at") or {}).items()},
                step=Version.parse(str(line.get("eval_id"))).step,
                prefix=f"eval/{line['workflow']}/" if line.get("workflow") else "eval/",
            )
        for line in self._arms_file.read_new().lines:
            numbers = {key: line.get(key) for key in ("difference", "low", "high", "num_pairs")}
            self._curves.add(numbers, step=_step(line), prefix=f"arm/{line.get('name')}/")
        self._curves.flush()


def _step(line: Line) -> int:
    return int(line.get("step", 0))
