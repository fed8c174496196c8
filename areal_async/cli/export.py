"""``export``: write a checkpoint of a run as a plain Hugging Face folder."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import find_run
from areal_async.monitor.output import check_place
from areal_async.process.atomic_folders import LEDGER, held, versions_in
from areal_async.process.stdio import say
from areal_async.trainer.output.checkpoint_retention import find_best, name_best

LAST, BEST = "last", "best"


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Export one checkpoint and say where it is.

    Raises:
        UserError: there is no such run or checkpoint, or the folder cannot be made.
    """
    directory = find_run(arguments.run).path
    settings = find_run(arguments.run).read_settings()
    with chosen(directory, settings, arguments.checkpoint) as version:
        output = Path(arguments.output) if arguments.output else directory / f"model_{version}"
        if output.exists():
            raise UserError(f"export: {output} is there already; remove it, or name another --output")
        check_place("--output", output)
        write(directory, settings, version, output)
    say(f"{output}: the model of checkpoint {version}, a Hugging Face folder")
    return 0


@contextmanager
def chosen(directory: Path, settings: Settings, wanted: str) -> Iterator[str]:
    """Give the version of the checkpoint that is meant, which a live run keeps while the block lasts.

    Raises:
        UserError: it is not there, or nothing tells which is the best.
    """
    while True:
        version = choose(directory, settings, wanted)
        folder = directory / "checkpoints" / version
        with held(folder, LEDGER) as is_there:
            if is_there or (folder.is_dir() and not (folder / LEDGER).exists()):  # no checkpoint: whoever reads it says
                yield version
                return


def choose(directory: Path, settings: Settings, wanted: str) -> str:
    """Return the version of the checkpoint that is meant.

    Raises:
        UserError: it is not there, or nothing tells which is the best.
    """
    there = [str(version) for version in versions_in(directory / "checkpoints")]
    if wanted == BEST:
        if settings.trainer.keep_best is None:
            judged = settings.trainer.model_copy(update={"keep_best": "reward"})
            settings = settings.model_copy(update={"trainer": judged})
        best = find_best(directory, settings)
        wanted = str(best) if best is not None else BEST
    elif wanted == LAST and there:
        wanted = there[-1]
    if wanted not in there:
        raise UserError(f"--run: {directory} has no checkpoint {wanted}, need one of {', '.join(there) or 'none'}")
    return wanted


def write(directory: Path, settings: Settings, version: str, output: Path) -> None:
    """Write the model of one checkpoint.

    Raises:
        UserError: a live run has removed it meanwhile.
    """
    # Imported here: torch takes seconds.
    from areal_async.trainer.output.export import export_policy

    export_policy(directory / "checkpoints" / version, output, model=settings.model, lora=settings.trainer.lora)


def write_best(settings: Settings) -> None:
    """Leave the best checkpoint's model as ``model_best/``, where ``trainer.keep_best`` asks for one."""
    directory = settings.run_directory
    best = name_best(directory, settings)
    if best is not None:
        write(directory, settings, str(best), directory / "model_best")
