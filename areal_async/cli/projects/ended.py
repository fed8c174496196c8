"""What is known of a run once its command has ended: for who had it started from Python (``areal_async.runs``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_async.cli.run import requested
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.host import visible_gpus
from areal_async.process.json_lines import read_json_lines

FINISHED, STOPPED = "finished", "stopped"


def directory_of(file: str | None, config: str | None, overrides: Sequence[str]) -> Path:
    """Return the directory, absolute, of the run that a command means.

    Raises:
        UserError: as ``requested``.
    """
    _, place = requested(file, config, overrides, has_gpu=bool(visible_gpus()))
    return (place.directory / place.name).absolute()


def ended(path: Path) -> dict[str, Any]:
    """Return the fields of a ``Run``, from its directory."""
    directory, model = RunDirectory(path), path / "model"
    is_finished = directory.exists and directory.checkpointed_step >= directory.read_settings().run.steps
    return {
        "name": path.name,
        "path": path,
        "status": FINISHED if is_finished else STOPPED,
        "metrics": read_json_lines(path / "metrics.jsonl"),
        "model": model if model.is_dir() else None,
    }
