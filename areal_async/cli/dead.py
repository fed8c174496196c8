"""``dead``: the prompts that failed all their attempts, why, and a second chance for them.

A re-admission is one entry in the run's log, by the operator. The controller derives all else from the log: a
fresh credit, the next attempt number, and ``rollout.max_attempts`` new attempts. On a live run it acts at once; on a
stopped one, whose broker is started for the while, when the run is started again.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import anyio
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.bus import Bus
from areal_async.controller.accounts import Accounts
from areal_async.errors import UserError
from areal_async.launch.run import visit
from areal_async.launch.run_directory import find_run
from areal_async.plain_text import escaped
from areal_async.run_state import RunState
from areal_async.settings import Settings
from areal_async.speech import say
from areal_async.subjects import ADMITTED, RUN_STATE
from areal_async.types import Admitted, Cut, GroupId, Outcome, OutcomeKind
from areal_async.wire import decode

DEAD = "dead"
WAITING = "to be tried again"
AGAIN = "tried again"


class DeadLetter(NamedTuple):
    """A group that ended ``dead``."""

    group: str
    prompt: int
    """Position of its row in the data."""
    workflow: str
    attempts: int
    """That failed, since the last re-admission."""
    reason: str
    """Of the last one."""
    when: str
    state: str
    """``dead``, or what became of its re-admission."""


class Register:
    """The dead letters of a run, as its log tells them. Pure."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self._dead: dict[str, tuple[Outcome, str]] = {}
        """Group -> its end, and when that was recorded."""

    def add(self, entry: Cut | Outcome, *, sequence: int, stored_at: str) -> None:
        """Read an entry of the log."""
        if isinstance(entry, Cut):
            self.accounts.add_cut(entry, sequence=sequence)
        else:
            self.accounts.add_outcome(entry)
            if entry.kind is OutcomeKind.DEAD and self.accounts.is_dead(entry.group_id):
                self._dead.setdefault(entry.group_id, (entry, stored_at))

    @property
    def letters(self) -> list[DeadLetter]:
        """Every group that ended dead, in the order of the log."""
        due = {item.group_id for item in self.accounts.due_readmissions}
        known = {item.group_id for item in self.accounts.readmissions}
        letters = []
        for group_id, (outcome, recorded_at) in self._dead.items():
            group = GroupId.parse(group_id)
            following = group.next_attempt
            letters.append(
                DeadLetter(
                    group=group_id,
                    prompt=group.index,
                    workflow=outcome.workflow,
                    attempts=outcome.num_failed_attempts,
                    reason=outcome.reason,
                    when=recorded_at,
                    state=WAITING if following in due else AGAIN if following in known else DEAD,
                )
            )
        return letters

    def choose(self, groups: Sequence[str] | None) -> list[str]:
        """Return the groups to re-admit: those named, or every dead one for ``None``.

        Raises:
            UserError: one is not dead, or is re-admitted already.
        """
        states = {letter.group: letter.state for letter in self.letters}
        if groups is None:
            return [group for group, state in states.items() if state == DEAD]
        for group in groups:
            if states.get(group) != DEAD:
                got = states.get(group, "no dead group")
                raise UserError(f"--readmit {group}: got {got}, need a dead group; dead --run NAME lists them")
        return list(dict.fromkeys(groups))

    def refuse_ended(self, state: RunState | None, settings: Settings) -> None:
        """Check that the run can still try something.

        Raises:
            UserError: it has finished, or admits nothing any more.
        """
        name, last_step = settings.run.name, settings.run.steps
        if state is not None and state.state == "finished":
            raise UserError(f"run {name}: it has finished, and tries nothing again; start another with --run.name")
        if self.accounts.journal.is_cut(last_step):
            raise UserError(f"run {name}: the batch of its last step {last_step} is cut, and it tries nothing again")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List dead letters, or have some tried again."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
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


async def read_register(bus: Bus) -> Register:
    """Read the dead letters as of now."""
    names = bus.names
    accounts = Accounts(max_groups_in_flight=0)
    register = Register(accounts)
    async for message in bus.find_messages(names.outcomes_stream, names.log):
        entry = decode(message.data, Cut) if message.subject == names.cuts else decode(message.data, Outcome)
        register.add(entry, sequence=message.sequence, stored_at=message.stored_at)
    record, _ = await bus.get(ADMITTED, Admitted)
    accounts.admitted = record or Admitted()
    return register


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


def show(letters: Sequence[DeadLetter], *, is_json: bool) -> None:
    """Print them for machines or for people."""
    if is_json:
        for letter in letters:
            say(json.dumps(letter._asdict()))
        return
    table = Table(*DeadLetter._fields)
    for letter in letters:
        table.add_row(*(Text(escaped(str(value))) for value in letter._replace(when=_local(letter.when))))
    console = Console(highlight=False)
    console.print(table if letters else "no dead letters")


def _local(when: str) -> str:
    return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M:%S") if when else ""
