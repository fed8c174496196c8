"""The prompts that failed all their attempts, as a run's log tells them."""

from collections.abc import Sequence
from typing import NamedTuple

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.errors import UserError
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import Admitted, Cut, GroupId, Outcome, OutcomeKind
from areal_async.protocol.wire import decode

DEAD = "dead"
WAITING = "to be tried again"
AGAIN = "tried again"


class DeadGroup(NamedTuple):
    """A group that ended ``dead``."""

    group: str
    prompt: int
    """Position of its row in the data."""
    workflow: str
    attempts: int
    """Failed attempts since the last re-admission."""
    reason: str
    """Why the last attempt failed."""
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
    def letters(self) -> list[DeadGroup]:
        """Every group that ended dead, in the order of the log."""
        due = {item.group_id for item in self.accounts.due_readmissions}
        known = {item.group_id for item in self.accounts.readmissions[:]}
        letters = []
        for group_id, (outcome, recorded_at) in self._dead.items():
            group = GroupId.parse(group_id)
            following = group.next_attempt
            letters.append(
                DeadGroup(
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
