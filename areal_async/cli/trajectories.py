"""``trajectories``: look at what a run has sampled: list it, show one token by token, export it.

Newest first. What was trained comes from the archive in the run's directory; what waits to be trained, and why others
never were, from the run's broker: a live run's own, and that of a stopped one is started for the while.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.errors import UserError
from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.output import check_place
from areal_async.monitor.recorded_text import draw
from areal_async.monitor.text import json_text
from areal_async.monitor.token_text import shown, visible
from areal_async.monitor.trajectory_export import SUFFIXES, describe, export
from areal_async.monitor.trajectory_list import (
    COLUMNS,
    STORED,
    TRAINED,
    Entry,
    Filters,
    archived,
    find_stored,
    read_stored,
    select,
    untrained,
)
from areal_async.monitor.trajectory_sources import ask, ask_untrained, find_given_up, find_recorded, load_decoder
from areal_async.process.stdio import say
from areal_async.protocol.fields import is_version
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import OutcomeKind, Trajectory
from areal_async.telemetry import log
from areal_async.trainer.output.archive_reader import ABANDONED, ArchivedTrajectory
from areal_async.trainer.output.archived_images import images_pattern

PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds."""
MAX_ERROR_CHARACTERS = 100
"""Of a reason in the list; ``--json`` and ``--show`` have it whole."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List, show or export."""
    log.quieten()
    directory = find_run(arguments.run)
    if arguments.show is not None:
        show(directory, arguments.show, with_tokens=arguments.tokens, is_json=arguments.json)
        return 0
    if arguments.export is not None:
        if Path(arguments.export).suffix not in SUFFIXES:
            raise UserError(f"--export: got {arguments.export}, need a name that ends in {', '.join(SUFFIXES)}")
        check_place("--export", Path(arguments.export))
    if arguments.limit is not None and arguments.limit < 0:
        raise UserError(f"--limit: got {arguments.limit}, need how many to list; 0 lists all")
    filters = filters_of(arguments)
    limit = arguments.limit if arguments.limit is not None else 0 if arguments.export else 50
    entries = select(
        archived(directory.path, steps=filters.steps),
        ask_untrained(directory),
        filters=filters,
        sort=arguments.sort,
        is_reversed=arguments.reverse,
        limit=limit,
    )
    if arguments.export is not None:
        write(directory, Path(arguments.export), entries)
    elif arguments.json:
        for entry in entries:
            say(json_text(entry._asdict()))
    else:
        print_list(entries, limit=limit)
    return 0


def filters_of(arguments: argparse.Namespace) -> Filters:
    """Read the filters.

    Raises:
        UserError: one cannot be read.
    """
    version = arguments.version
    if version is not None and not version.isdecimal() and not is_version(version):
        raise UserError(f"--version: got {version}, need <lineage>-<step> like 1-42, or a step alone")
    if arguments.sort not in ("newest", *COLUMNS):
        raise UserError(f"--sort: got {arguments.sort}, need one of newest, {', '.join(COLUMNS)}")
    given = {one.name: getattr(arguments, one.name) for one in fields(Filters) if one.name != "steps"}
    return Filters(steps=_steps(arguments.step), **given)


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UserError(f"--step: got {text}, need a step like 5, or steps like 5-9")
    return int(first), int(last or first)


def write(directory: RunDirectory, path: Path, entries: Sequence[Entry]) -> None:
    """Export entries with their tokens, from the archive and, as far as they are stored, from the broker."""
    stored: dict[str, Trajectory] = {}
    if wanted := {entry.id for entry in entries if entry.state != TRAINED and entry.sibling is not None}:
        read = functools.partial(read_stored, wanted=wanted)
        stored = ask(directory, read, otherwise="what was not trained has no tokens") or {}
    if gone := wanted - stored.keys():  # a live run has trained them meanwhile
        now = {entry.id: entry for entry in archived(directory.path) if entry.id in gone}
        entries = [now.get(entry.id, entry) for entry in entries]
    count = export(path, entries, find_recorded(directory, entries), load_decoder(directory), stored=stored)
    say(f"{count} trajectories written to {path}")


def print_list(entries: Sequence[Entry], *, limit: int) -> None:
    """Print a table, and how to see one of it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    if not entries:
        console.print("no trajectories")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    numbers = ("step", "reward", "advantage", "tokens", "turns")
    for name in ("step", "group.sibling", "workflow", *numbers[1:], "versions", "truncated"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    table.add_column("error", overflow="fold")
    for entry in entries:
        table.add_row(
            "" if entry.step is None else str(entry.step),
            Text(shown(entry.id)),
            Text(shown(entry.workflow)),
            "" if entry.reward is None else f"{entry.reward:g}",
            "" if entry.advantage is None else f"{entry.advantage:+.3f}",
            "" if entry.tokens is None else str(entry.tokens),
            "" if entry.turns is None else str(entry.turns),
            entry.versions,
            "yes" if entry.truncated else "",
            Text(_error(entry), style="red" if entry.error else "dim"),
        )
    console.print(table)
    more = f"; the {limit} newest, --limit 0 lists all" if limit and len(entries) == limit else ""
    console.print(f"{len(entries)} listed{more}; --show GROUP.SIBLING shows one", style="dim")


def _error(entry: Entry) -> str:
    if entry.state == STORED:
        return "not trained yet"
    text = visible(entry.error, newline=" ")
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def show(directory: RunDirectory, name: str, *, with_tokens: bool, is_json: bool) -> None:
    """Print one trajectory whole.

    Raises:
        UserError: there is none of that name.
    """
    entry = next((one for one in archived(directory.path) if one.id == name), None)
    recorded: ArchivedTrajectory | None = None
    if entry is not None:
        recorded = find_recorded(directory, [entry])[entry.id]
        trajectory = recorded.trajectory
    elif (given_up := find_given_up(directory, name)) is not None:
        entry, recorded = given_up
        trajectory = recorded.trajectory
    else:
        entry, trajectory = _find_untrained(directory, name)
    decoder = load_decoder(directory)
    if is_json:
        say(json_text(describe(entry, recorded, trajectory, decoder)))
    else:
        drawn = draw(
            entry,
            trajectory,
            decoder,
            recorded=recorded,
            with_tokens=with_tokens,
            images_in=_images_in(directory, entry, recorded),
        )
        Console(highlight=False).print(drawn)


def _images_in(directory: RunDirectory, entry: Entry, recorded: ArchivedTrajectory | None) -> str:
    """Say where the images are that a trajectory shows, as a data set or as subjects."""
    if recorded is not None:
        pattern = images_pattern(directory.path, recorded.made)
        return str(pattern if entry.state == TRAINED else pattern.parent / ABANDONED / pattern.name)
    names = Names(directory.read_settings().run.name)
    return f"the stream {names.images_stream}, subjects {names.images(entry.group, '*')}"


def _find_untrained(directory: RunDirectory, name: str) -> tuple[Entry, Trajectory]:
    async def find() -> tuple[Entry, Trajectory]:
        async with visit(directory, needs_whole=False) as (_, bus):
            found = [entry for entry in await untrained(bus) if entry.id == name]
            if not found:
                raise UserError(f"--show: got {name}, need GROUP.SIBLING as the list has it")
            if found[0].state == OutcomeKind.ROLLED_BACK:
                raise UserError(f"--show: got {name}, which is a group, need one of its siblings, as {name}.0")
            if found[0].sibling is None:
                raise UserError(f"--show {name}: its trajectories are gone; what is left: {found[0].error}")
            return found[0], await find_stored(bus, found[0])

    return anyio.run(find, backend_options={"use_uvloop": True})
