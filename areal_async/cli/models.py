"""``models``: what is kept over all runs of a folder; who did what to a run; and what may go, deleted.

Of a stopped run nothing goes that it needs when it is started again: its broker says what that is, and is started for
the while. Of a live one nothing goes at all: it deletes by itself.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.bus import Bus
from areal_async.config.settings import RunSettings
from areal_async.errors import BusError, UserError, leaves_of
from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.text import json_text
from areal_async.process.plain_text import escaped
from areal_async.process.stdio import say
from areal_async.protocol.subjects import CHECKPOINT
from areal_async.protocol.types import CheckpointRecord, Version, WeightsVersion
from areal_async.telemetry import log
from areal_async.versions import audit, registry
from areal_async.versions.registry import RULES, Kept

UNITS = ("B", "kB", "MB", "GB", "TB")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List, tell or delete; the status is 1 where a run could not be looked into."""
    log.quieten()
    check_arguments(arguments)
    if arguments.audit:
        tell(audit.read(find_run(arguments.run).path), as_json=arguments.json)
        return 0
    directories = directories_of(arguments)
    if arguments.delete is not None:
        return delete(directories, arguments.delete, keep_newest=arguments.keep_newest, does=arguments.yes)
    return show(directories, as_json=arguments.json)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what means nothing.

    Raises:
        UserError: one of them.
    """
    if arguments.audit and arguments.run is None:
        raise UserError("--audit: got no --run, need the run whose trail it is")
    if arguments.audit and arguments.delete is not None:
        raise UserError("--delete: got --audit as well, need one of the two")
    if arguments.delete is not None and arguments.delete not in RULES:
        rules = "; ".join(f"{rule}: {what}" for rule, what in RULES.items())
        raise UserError(f"--delete: got {arguments.delete:.70}, need a rule ({rules})")
    if arguments.yes and arguments.delete is None:
        raise UserError("--yes: got no --delete, need a rule by which something goes")
    if arguments.keep_newest < 1:
        raise UserError(f"--keep-newest: got {arguments.keep_newest}, need at least 1")


def directories_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the directories of the runs that are meant.

    Raises:
        UserError: there is no such run or folder.
    """
    if arguments.run is not None:
        return [find_run(arguments.run).path]
    folder = Path(arguments.folder) if arguments.folder is not None else RunSettings().directory
    if not folder.is_dir():
        raise UserError(f"--folder: got {folder}, need a folder of runs")
    return registry.runs_in(folder)


# listing


def show(directories: Iterable[Path], *, as_json: bool) -> int:
    """Print what is kept, one row or JSON object for each version."""
    status = 0
    found: list[Kept] = []
    for directory in directories:
        try:
            found += registry.kept(directory)
        except UserError as exc:
            say(f"{directory}: {exc}")
            status = 1
    if as_json:
        for one in found:
            say(json_text(asdict(one)))
        return status
    table = Table(box=None)
    for title in ("run", "version", "from", "tags", "held out", "kept", "size", "settings", "data", "code"):
        may_wrap = title in ("kept", "settings", "data", "code")
        width = len("checkpoint,") if title == "kept" else None
        table.add_column(title, no_wrap=not may_wrap, min_width=width, overflow="fold")
    for one in found:
        cells = [
            one.run,
            one.version,
            one.parent,
            ", ".join(one.tags),
            "" if one.accuracy is None else f"{one.accuracy:.3f}",
            ", ".join(one.kinds),
            size_text(one.num_bytes),
            one.settings[:8],
            registry.short_hash(one.data),
            registry.short_hash(one.code),
        ]
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    Console(highlight=False).print(table if found else "nothing is kept")
    return status


def size_text(num_bytes: float) -> str:
    """Return ``3.1 GB``."""
    for unit in UNITS[:-1]:
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {UNITS[-1]}"


def tell(acts: Sequence[audit.Act], *, as_json: bool) -> None:
    """Print an audit trail."""
    if as_json:
        for act in acts:
            say(json_text(act._asdict()))
        return
    table = Table("when (UTC)", "who", "what", "why", box=None)
    for act in acts:
        when = act.at.partition(".")[0].replace("T", " ")
        table.add_row(*(Text(escaped(cell)) for cell in (when, act.by, act.what, act.why)))
    Console(highlight=False).print(table if acts else "nobody has done anything")


# deleting


def delete(directories: Iterable[Path], rule: str, *, keep_newest: int, does: bool) -> int:
    """Delete what a rule lets go, or say what that is; the status is 1 where something of it could not be deleted."""
    status, num_bytes, count = 0, 0, 0
    for directory in directories:
        try:
            gone = _delete_of(RunDirectory(directory.absolute()), rule, keep_newest=keep_newest, does=does)
        except* (UserError, BusError) as group:
            say(f"{directory.name}: nothing of it is deleted: {leaves_of(group)[0]}")
            status, gone = int(does), []
        count, num_bytes = count + len(gone), num_bytes + sum(one.num_bytes for one in gone)
    done = "deleted" if does else "would be deleted; --yes deletes them"
    say(f"{count} folders of {size_text(num_bytes)} {done}")
    return status


def _delete_of(directory: RunDirectory, rule: str, *, keep_newest: int, does: bool) -> list[registry.Deletable]:
    """Return what is gone, or would be; the broker is asked only where there is something."""
    if not registry.deletable(directory.path, rule, keep_newest=keep_newest, needed=()):
        return []
    if directory.is_live:
        raise UserError("it lives, and deletes by itself (trainer.keep_checkpoints); stop it first")

    async def act() -> list[registry.Deletable]:
        async with visit(directory) as (_, bus):
            if directory.is_live:
                raise UserError("it has just been started")
            needed = await needed_by(bus)
            found = registry.deletable(directory.path, rule, keep_newest=keep_newest, needed=needed)
            gone = [one for one in found if not does or registry.remove(directory.path, one)]
        for one in gone:
            say(f"{'deleted' if does else 'would delete'} {one.path} ({size_text(one.num_bytes)})")
        return gone

    return anyio.run(act, backend_options={"use_uvloop": True})


async def needed_by(bus: Bus) -> set[Version]:
    """Return the versions that a run goes on from: its newest checkpoint, and the weights that were announced last."""
    checkpoint, _ = await bus.get(CHECKPOINT, CheckpointRecord)
    found = [checkpoint.version] if checkpoint is not None else []
    for weights, _ in (await bus.entries("weights.", WeightsVersion)).values():
        found += [weights.version, weights.on_disk]
    return {Version.parse(text) for text in found if text}
