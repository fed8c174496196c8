"""``export``: write a checkpoint of a run as a plain Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import find_run
from areal_async.monitor.output import check_place
from areal_async.process.stdio import say
from areal_async.protocol.types import Version
from areal_async.trainer.output.checkpoint_retention import name_best
from areal_async.versions.resolve import kept
from areal_async.versions.tags import LAST


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Export one checkpoint and say where it is.

    Raises:
        UserError: there is no such run or checkpoint, or the folder cannot be made.
    """
    directory = find_run(arguments.run).path
    settings = find_run(arguments.run).read_settings()
    if arguments.version is not None and arguments.checkpoint is not None:
        raise UserError("--checkpoint: got --version as well, need one of the two")
    option = "--version" if arguments.checkpoint is None else "--checkpoint"
    with kept(directory, settings, arguments.version or arguments.checkpoint or LAST, option=option) as version:
        output = Path(arguments.output) if arguments.output else directory / f"model_{version}"
        if output.exists():
            raise UserError(f"export: {output} is there already; remove it, or name another --output")
        check_place("--output", output)
        write(directory, settings, version, output)
    say(f"{output}: the model of checkpoint {version}, a Hugging Face folder")
    return 0


def write(directory: Path, settings: Settings, version: Version, output: Path) -> None:
    """Write the model of one checkpoint.

    Raises:
        UserError: a live run has removed it meanwhile.
    """
    # Imported here: torch takes seconds.
    from areal_async.trainer.output.export import export_policy

    export_policy(directory / "checkpoints" / str(version), output, model=settings.model, lora=settings.trainer.lora)


def write_best(settings: Settings) -> None:
    """Leave the best checkpoint's model as ``model_best/``, where ``trainer.keep_best`` asks for one."""
    directory = settings.run_directory
    best = name_best(directory, settings)
    if best is not None:
        write(directory, settings, best, directory / "model_best")
