"""``export``: write a checkpoint of a run as a Hugging Face folder; it, or trajectories, for the Hub, and push that."""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.output import check_place
from areal_async.process.stdio import say
from areal_async.protocol.types import Version
from areal_async.trainer.output.checkpoint_retention import name_best
from areal_async.versions.resolve import kept, resolve
from areal_async.versions.tags import LAST


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Export one checkpoint, or the trajectories up to one, and say where that is.

    Raises:
        UserError: there is no such run or version, the folder cannot be made, or a secret would be in it.
        PipelineError: the hub has not taken it.
    """
    directory = find_run(arguments.run)
    settings = directory.read_settings()
    if arguments.version is not None and arguments.checkpoint is not None:
        raise UserError("--checkpoint: got --version as well, need one of the two")
    is_for_hub = arguments.to is not None or arguments.push is not None or arguments.trajectories
    if arguments.output is not None and is_for_hub:
        raise UserError("--output: got what is for the hub as well, need one of the two; name its folder by --to")
    option = "--version" if arguments.checkpoint is None else "--checkpoint"
    wanted = arguments.version or arguments.checkpoint or LAST
    if arguments.trajectories:
        from areal_async.trainer.output.archive_reader import archive_files  # imported here: pyarrow takes a while

        there = archive_files(directory.path)
        _for_hub(arguments, directory, settings, resolve(directory.path, settings, wanted, option=option, among=there))
        return 0
    with kept(directory.path, settings, wanted, option=option) as version:
        if is_for_hub:
            _for_hub(arguments, directory, settings, version)
        else:
            output = Path(arguments.output) if arguments.output else directory.path / f"model_{version}"
            _check_free("--output", output)
            write(directory.path, settings, version, output)
            say(f"{output}: the model of checkpoint {version}, a Hugging Face folder")
    return 0


def _for_hub(arguments: argparse.Namespace, directory: RunDirectory, settings: Settings, version: Version) -> None:
    """Write the folder that the hub is to have, unless an earlier push has left it there, and push it."""
    # Imported here: what draws and loads it takes a while.
    from areal_async.hub.data_set import write_data_set
    from areal_async.hub.facts import RunFacts
    from areal_async.hub.folders import DATA_SET, FOLDER, MODEL, Exported, read_exported, write_model
    from areal_async.hub.known_secrets import KnownSecrets
    from areal_async.hub.push import check_name, push
    from areal_async.monitor.trajectory_sources import load_decoder

    exported = Exported(DATA_SET if arguments.trajectories else MODEL, settings.run.name, str(version))
    folder = Path(arguments.to) if arguments.to else directory.path / FOLDER / exported.place
    if arguments.push is not None:
        check_name(arguments.push)
    secrets = KnownSecrets.of_run(settings, directory.path)
    if arguments.push is not None and read_exported(folder) == exported:
        secrets.refuse_in(folder)
    else:
        _check_free("--to", folder)
        facts = RunFacts.read(directory.path, settings, version)
        if arguments.trajectories:
            write_data_set(folder, directory.path, facts, secrets, load_decoder(directory))
        else:
            write_model(folder, facts, secrets, write=functools.partial(write, directory.path, settings, version))
    say(f"{folder}: the {exported.what}, with a card, as the hub is to have it")
    if arguments.push is not None:
        say(f"{push(folder, arguments.push, exported.kind)}: pushed; a new repository is private until you publish it")


def _check_free(option: str, folder: Path) -> None:
    if os.path.lexists(folder):  # a link that leads nowhere, too
        raise UserError(f"export: {folder} is there already; remove it, or name another {option}")
    check_place(option, folder)


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
