"""``arm``: versions that answer additional prompts beside a live run, each prompt beside the newest weights."""

import argparse
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from areal_async.bus import Bus
from areal_async.cli.export import write
from areal_async.cli.orders import give, who
from areal_async.cli.starting.checks import check_model
from areal_async.config.settings import Settings
from areal_async.controller import arm_orders
from areal_async.errors import UserError
from areal_async.launch.run import visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.snapshot import ask_status
from areal_async.process.stdio import say
from areal_async.protocol.arms import ARM_NAME, PARTS, Arms
from areal_async.protocol.fields import MAX_REWARD
from areal_async.protocol.subjects import ARMS
from areal_async.telemetry import log
from areal_async.versions import tags
from areal_async.versions.arms import FOLDER, arm_text
from areal_async.versions.resolve import kept

RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "share": (lambda value: 1 / PARTS <= value <= 1, f"{1 / PARTS:g} to 1"),
    "alpha": (lambda value: 0 < value < 1, "a number between 0 and 1"),
    "reach": (lambda value: 0 < value <= 2 * MAX_REWARD, f"more than 0, at most {2 * MAX_REWARD:g}"),
}
"""What ``protocol.arms`` takes, said before a version is exported for nothing."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Add an arm, list all, or remove one."""
    log.quieten()
    directory = find_run(arguments.run)
    act = {"add": _add, "list": _list, "remove": _remove}[arguments.action]
    _check_words(arguments)
    anyio.run(act, directory, arguments, backend_options={"use_uvloop": True})
    return 0


def _check_words(arguments: argparse.Namespace) -> None:
    """Refuse words of one action beside another, and what can be no arm, before a version is exported for it.

    Raises:
        UserError: there is one, or one is missing.
    """
    adding = ("version", "model", "share", "alpha", "reach")
    if arguments.action != "add" and (given := [one for one in adding if getattr(arguments, one) is not None]):
        raise UserError(f"arm {arguments.action}: got --{given[0]}, need none; it is for arm add")
    if arguments.action == "add" and (arguments.version is None) is (arguments.model is None):
        raise UserError("arm add: need either --version of the run or --model, a folder or hub name")
    if (arguments.action == "remove") is (arguments.name is None) and arguments.action != "add":
        need = "the name of an arm" if arguments.action == "remove" else "no name"
        raise UserError(f"arm {arguments.action}: got {arguments.name}, need {need}")
    if arguments.name is not None and not re.fullmatch(ARM_NAME, arguments.name):
        raise UserError(f"arm: got the name {arguments.name!r:.70}, need up to 48 letters, digits or _, no digit first")
    for name, (accepts, need) in RANGES.items():
        if (value := getattr(arguments, name)) is not None and not accepts(value):
            raise UserError(f"--{name}: got {value:g}, need {need}")
    if arguments.model is not None:
        check_model(arguments.model, "--model", asks_hub=False)


async def _add(directory: RunDirectory, arguments: argparse.Namespace) -> None:
    async with visit_live(directory) as (settings, bus):  # before anything is exported for it
        given = {name: getattr(arguments, name) for name in arm_orders.NUMBERS if getattr(arguments, name) is not None}
        body = given | _said(arguments)
        if arguments.model is not None:
            name = arguments.name or _name_of(Path(arguments.model).name)
            body |= {"name": name, "path": _model(arguments.model)}
            say(f"run {settings.run.name}: {(await give(directory, bus, arm_orders.ADD, body))['sentence']}")
            return
        await _add_version(directory, arguments, settings, bus, body)


async def _add_version(
    directory: RunDirectory, arguments: argparse.Namespace, settings: Settings, bus: Bus, body: dict[str, Any]
) -> None:
    """Export a version into a folder of its own, which no live run deletes, and have it be an arm."""
    arms, _ = await bus.get(ARMS, Arms)
    with kept(directory.path, settings, arguments.version) as version:
        is_tag = arguments.version in tags.read(directory.path)
        name = arguments.name or _name_of(arguments.version if is_tag else str(version))
        if arms is not None and name in arms.by_name:
            raise UserError(f"arm {name}: the run has one of that name; remove it first, or take another name")
        folder = (directory.path / FOLDER / f"{name}-{version}").absolute()
        await anyio.to_thread.run_sync(write, directory.path, settings, version, folder)
    try:
        body |= {"name": name, "version": str(version), "path": str(folder)}
        answer = await give(directory, bus, arm_orders.ADD, body)
    except UserError:
        arms, _ = await bus.get(ARMS, Arms)
        if arms is None or name not in arms.by_name:  # else the order was heard, and its answer was not
            shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"run {settings.run.name}: {answer['sentence']}")


async def _list(directory: RunDirectory, arguments: argparse.Namespace) -> None:
    arms = (await ask_status(directory)).arms
    for name, arm in arms.items():
        say(f"{name}  {arm_text(arm)}")
        for node, why in arm["not_served"].items():
            say(f"  not on node {node}: {why}")
    if not arms:
        say("no arm; arm add --run NAME --version V has one answer prompts beside the newest weights")


async def _remove(directory: RunDirectory, arguments: argparse.Namespace) -> None:
    async with visit_live(directory) as (settings, bus):
        body = {"name": arguments.name, **_said(arguments)}
        answer = await give(directory, bus, arm_orders.REMOVE, body)
        remove_own((directory.path / FOLDER).absolute(), str(answer.get("path")))
        say(f"run {settings.run.name}: {answer['sentence']}")


def remove_own(folder: Path, told: str) -> None:
    """Delete the model of an arm, where that is one of those in ``folder``: what the run tells may be any path."""
    path = folder / Path(told).name
    if told == str(path) and path.name != os.pardir:
        shutil.rmtree(path, ignore_errors=True)


def _said(arguments: argparse.Namespace) -> dict[str, str]:
    return {"by": arguments.by or who(), "reason": arguments.reason or ""}


def _name_of(text: str) -> str:
    """Return the name of an arm that was given none: ``1-40`` becomes ``v1_40``, a tag stays itself.

    Raises:
        UserError: none can be made.
    """
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text)[:40].strip("_")
    name = f"v{name}" if name[:1].isdecimal() else name
    if not re.fullmatch(ARM_NAME, name):
        raise UserError(f"arm add: no name can be made of {text:.100}; give one: arm add NAME ...")
    return name


def _model(text: str) -> str:
    """Return a folder as all nodes find it; what is none here is the hub's."""
    return str(Path(text).absolute()) if Path(text).is_dir() else text
