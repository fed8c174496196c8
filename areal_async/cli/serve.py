"""``serve``: an OpenAI-compatible endpoint of versions of a run, or of a model; its keys, and what it has recorded."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio

from areal_async.cli.starting.checks import check_interpreter, check_served, check_template
from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.errors import UserError
from areal_async.inference.commands import check_tool_call_parser
from areal_async.launch.run_directory import find_run
from areal_async.process.stdio import say
from areal_async.serving.folders import OneModel, RunVersions, Versions
from areal_async.serving.gpus import gpus_taken, sharing
from areal_async.serving.keys import FIRST, Keyring, add_key
from areal_async.serving.split import Share, read_split
from areal_async.telemetry import log
from areal_async.telemetry.exporters.traces import check_installed, recording
from areal_async.versions.resolve import resolve

if TYPE_CHECKING:
    from areal_async.doctor.preflight.machine import Gpu

CHAMPION = "champion"
"""The tag whose version answers where nothing else is said."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serve until told to end, or make a key, or write what was recorded."""
    check_arguments(arguments)
    settings, run_directory = _settings_of(arguments, overrides)
    directory = _place(settings, run_directory)
    keys = settings.serve.keys or directory / "keys"
    if arguments.export is not None:
        from areal_async.serving.export import export  # imported here: pyarrow takes a while

        num_rows, damaged = export(directory, arguments.export, form=arguments.form)
        for path, num_lines in damaged.items():
            say(f"{num_lines} damaged lines left out of {path}")
        say(f"{num_rows} {arguments.form} written to {arguments.export}")
        return 0
    if arguments.new_key is not None:
        say(f"key {arguments.new_key}: {add_key(keys, arguments.new_key)} (told once; {keys} has its hash)")
        return 0
    _check(settings)
    shares = _shares_of(arguments, run_directory)
    if notice := check_gpus(settings, num_arms=len(shares)):
        say(notice)
    versions: Versions
    if run_directory is None:
        versions = OneModel(settings.model.path, shares[0].arm)
    else:
        versions = RunVersions(run_directory, directory / "models", partial(_resolve, run_directory, settings))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.configure("serve", directory / "logs")
    if settings.serve.keys is None and not keys.exists():
        say(f"key {FIRST}: {add_key(keys, FIRST)} (told once; {keys} has its hash)")
    # Imported here: it takes a second, and a key needs none of it.
    from areal_async.serving.server import serve

    name = run_directory.name if run_directory is not None else shares[0].arm
    work = partial(
        serve, settings, name=name, shares=shares, versions=versions, directory=directory, keyring=Keyring(keys),
        tell=say,
    )  # fmt: skip
    with recording(settings, directory, role="serve"):
        anyio.run(work, backend_options={"use_uvloop": True})
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what means nothing.

    Raises:
        UserError: one of them.
    """
    if (arguments.run is None) == (arguments.model is None):
        got = "neither" if arguments.run is None else "both"
        raise UserError(f"serve: got {got} of --run and --model, need one: a run with versions, or a model folder")
    for name in ("version", "split") if arguments.model is not None else ("config",):
        if getattr(arguments, name) is not None:
            other = "--model, which is one version" if arguments.model is not None else "--run, which has its own"
            raise UserError(f"--{name}: got it with {other}; leave one of them out")
    if arguments.version is not None and arguments.split is not None:
        raise UserError("--version: got --split as well, whose arms are versions; leave one of them out")


def check_gpus(settings: Settings, *, num_arms: int, gpus: "Sequence[Gpu] | None" = None) -> str:
    """Refuse GPUs that something else uses, like a run that lives: one of both would end for want of memory.

    Args:
        gpus: those that the driver tells of; it is asked for them unless they are given.

    Returns:
        What is to be known where ``serve.replace`` says that GPUs are shared; empty where nothing is.

    Raises:
        UserError: one that would be taken is in use, or there are too few, and it does not say so.
    """
    # Imported here: they take a while, and a key needs none of it.
    from areal_async.doctor.preflight.machine import look_at_machine
    from areal_async.doctor.preflight.memory import is_used

    gpus = look_at_machine().gpus if gpus is None else gpus
    taken = gpus_taken(settings, num_arms=num_arms)
    used = [gpu.number for gpu in gpus if gpu.number in taken and is_used(gpu)]
    if not used:
        return sharing(settings, num_arms=num_arms)
    free = ", ".join(gpu.number for gpu in gpus if not is_used(gpu)) or "none"
    said = f"serve: got GPU {', '.join(used)} with memory that others have taken"
    if settings.serve.replace != "auto":
        return f"{said}; free here: {free}"
    raise UserError(
        f"{said}, need {len(taken)} that nothing else uses; name them by CUDA_VISIBLE_DEVICES (free here: {free}), or "
        "set serve.replace to say that GPUs are shared"
    )


def _settings_of(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[Settings, Path | None]:
    """Return the settings, and the run's directory; None for a model without a run."""
    if arguments.run is not None:
        directory = find_run(arguments.run)
        settings, path = load_settings(directory.config, overrides, use_environment=False), directory.path
    else:
        config = Path(arguments.config) if arguments.config is not None else None
        settings, path = load_settings(config, [*overrides, "--model.path", arguments.model]), None
    # The servers share their GPUs with no trainer, and nothing is broadcast to them.
    alone = settings.inference.model_copy(update={"colocate": None, "weight_transfer": "disk", "disk_every": None})
    return settings.model_copy(update={"inference": alone}), path


def _place(settings: Settings, run_directory: Path | None) -> Path:
    """Return where keys, records and exported models are."""
    if settings.serve.directory is not None:
        return settings.serve.directory
    if run_directory is not None:
        return run_directory / "served"
    return settings.run.directory / "served" / Path(settings.model.path).name


def _shares_of(arguments: argparse.Namespace, run_directory: Path | None) -> list[Share]:
    if run_directory is None:
        return [Share(quote(Path(arguments.model).name, safe="._-") or "model", 1.0)]
    if arguments.split is not None:
        return read_split(arguments.split)
    return [Share(arguments.version or CHAMPION, 1.0)]


def _resolve(run_directory: Path, settings: Settings, wanted: str) -> str:
    return str(resolve(run_directory, settings, wanted))


def _check(settings: Settings) -> None:
    """Refuse what can be seen to be wrong before anything is started.

    Raises:
        UserError: the model, its template, the server's interpreter or an extra that is asked for is not there.
    """
    check_served(settings)
    check_template(settings)
    check_interpreter(settings.inference.python)
    check_tool_call_parser(settings.inference)
    check_installed(settings.metrics)
