"""``dead``: the prompts that failed all their attempts, why, and a second chance for them.

A re-admission is one entry in the run's log, by the operator. The controller derives all else from the log: a
fresh credit, the next attempt number, and ``rollout.max_attempts`` new attempts. On a live run it acts at once; on a
stopped one, whose broker is started for the while, when the run is started again.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run import visit
from areal_async.launch.run_directory import find_run
from areal_async.monitor.register import DeadGroup, read_register
from areal_async.process.plain_text import escaped
from areal_async.process.stdio import say
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.protocol.types import GroupId, Outcome, OutcomeKind
from areal_async.telemetry import log


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List dead letters, or have some tried again."""
    log.quieten()
    groups = arguments.readmit
    if arguments.all and groups is None:
        raise UserError("--all: got no --readmit; give --readmit --all to have every dead group tried again")
    if groups is not None and bool(groups) == arguments.all:
        raise UserError("--readmit: need either GROUP... or --all; dead --run NAME lists the groups")
    directory = find_run(arguments.run)

    async def act() -> None:
        async with visit(directory) as (settings, bus):
            if groups is None:
                show((await read_register(bus)).letters, is_json=arguments.json)
            else:
                for group in await readmit(bus, settings, groups or None):
                    say(f"{group}: to be tried again as {GroupId.parse(group).next_attempt}")

    anyio.run(act, backend_options={"use_uvloop": True})
    return 0


async def readmit(bus: Bus, settings: Settings, groups: Sequence[str] | None) -> list[str]:
    """Have dead groups tried again, all of them for ``None``; return which.

    Raises:
        UserError: a group is not dead, or the run tries nothing any more.
    """
    register = await read_register(bus)
    state, _ = await bus.get(RUN_STATE, RunState)
    register.refuse_ended(state, settings)
    chosen = register.choose(groups)
    for group in chosen:
        entry = Outcome(group_id=group, kind=OutcomeKind.READMITTED, lineage=0, reason="by the operator")
        await bus.publish(bus.names.outcomes, entry, msg_id=f"readmitted.{group}")
    return chosen


def show(letters: Sequence[DeadGroup], *, is_json: bool) -> None:
    """Print them for machines or for people."""
    if is_json:
        for letter in letters:
            say(json.dumps(letter._asdict()))
        return
    table = Table(*DeadGroup._fields)
    for letter in letters:
        table.add_row(*(Text(escaped(str(value))) for value in letter._replace(when=_local(letter.when))))
    console = Console(highlight=False)
    console.print(table if letters else "no dead letters")


def _local(when: str) -> str:
    return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M:%S") if when else ""
