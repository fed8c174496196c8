"""The trajectories of a run, from wherever they are: the archive, the stream, and the log of what became of others.

The archive has what was trained and is read by headers alone, newest step first. The broker has what waits to be
trained, and the reasons of what never was; a run whose broker cannot be asked still has its archive.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_async.bus import Bus
from areal_async.errors import UserError, WireError
from areal_async.protocol.fields import OWN_INFO
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.protocol.types import Cut, DeadLetter, Outcome, OutcomeKind, Slot, SlotStatus, Trajectory, Version
from areal_async.protocol.wire import decode, decode_headers, decode_trajectory
from areal_async.trainer.output.archive_reader import ArchivedTrajectory, archive_files, read_recorded

TRAINED, STORED, LEFT = "trained", "stored", "left"


class Entry(NamedTuple):
    """One line of the list: a trajectory, or a group of which only the outcome is left."""

    id: str
    """``<group>.<sibling>``, or the group's."""
    state: str
    """``trained``, ``stored`` (not trained yet), ``left`` (stored when its run finished), or what became of it."""
    step: int | None
    """That trained it, or in which its fate was found out."""
    group: str
    sibling: int | None
    workflow: str
    reward: float | None
    advantage: float | None
    """Mean over its replies where they have their own."""
    tokens: int | None
    output_tokens: int | None
    """Sampled ones."""
    turns: int | None
    oldest: str
    newest: str
    error: str
    truncated: int | None
    """Turns that ended by length."""
    near_step: int
    """The step that was newest when it was last heard of: its place in time."""

    @property
    def versions(self) -> str:
        """Of the weights that sampled it."""
        return self.oldest if self.oldest == self.newest else f"{self.oldest}..{self.newest}"


UNDECODABLE = "undecodable"
FAILED = (SlotStatus.FAILED, OutcomeKind.FAILED, OutcomeKind.DEAD, UNDECODABLE)
"""States of what was to be trained and broke, against what was withdrawn, filtered or came too late."""
COLUMNS = ("step", "group", "sibling", "workflow", "state", "reward", "advantage", "tokens", "turns", "truncated")
"""By which a list can be sorted, besides ``newest``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Which entries are wanted; None admits all."""

    steps: tuple[int, int] | None = None
    workflow: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    version: str | None = None
    """``1-42``, or a step of any lineage."""
    error: str | None = None
    """Has an error that contains this, in any case of letters."""
    failed: bool = False
    """Only those that failed (``FAILED``)."""

    def admit(self, entry: Entry) -> bool:
        """Say whether an entry is wanted. One without a reward or tokens has none of a wanted size."""
        first, last = self.steps or (0, 0)
        return all(
            (
                self.steps is None or (entry.step is not None and first <= entry.step <= last),
                self.workflow is None or entry.workflow == self.workflow,
                _is_within(entry.reward, self.min_reward, self.max_reward),
                _is_within(entry.tokens, self.min_tokens, self.max_tokens),
                self.version is None or _holds_version(entry, self.version),
                self.error is None or bool(entry.error and self.error.lower() in entry.error.lower()),
                not self.failed or entry.state in FAILED,
            )
        )


def _is_within(value: float | None, least: float | None, most: float | None) -> bool:
    if least is None and most is None:
        return True
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


def _holds_version(entry: Entry, wanted: str) -> bool:
    if not entry.oldest:
        return False
    oldest, newest = Version.parse(entry.oldest), Version.parse(entry.newest)
    if wanted.isdecimal():
        return oldest.step <= int(wanted) <= newest.step
    return oldest <= Version.parse(wanted) <= newest


def archived(run_directory: Path, *, steps: tuple[int, int] | None = None) -> Iterator[Entry]:
    """Yield what was trained, newest step first, each step's batch in its order."""
    for version, paths in sorted(archive_files(run_directory).items(), key=lambda pair: -pair[0].step):
        if steps is not None and not steps[0] <= version.step <= steps[1]:
            continue
        try:
            recorded = read_recorded(paths, with_tokens=False)
        except UserError:
            if all(path.exists() for path in paths):
                raise
            continue  # a restored trainer has just moved it away
        yield from map(entry_of, recorded)


def entry_of(recorded: ArchivedTrajectory) -> Entry:
    """Return the line of a trained trajectory."""
    step, info = recorded.made.step, recorded.trajectory.info
    return _of_slot(
        recorded.trajectory.slot, state=TRAINED, step=step, group=recorded.group_id, workflow=recorded.workflow,
        advantage=recorded.advantage, turns=info.get(f"{OWN_INFO}num_turns", info.get("num_turns")), near_step=step,
    )  # fmt: skip


async def untrained(bus: Bus) -> list[Entry]:
    """Ask the broker for what waits to be trained, and for what became of all that was not."""
    names = bus.names
    newest_step = 0
    settled: list[Entry] = []
    async for message in bus.find_messages(names.outcomes_stream, names.log):
        try:
            if message.subject == names.cuts:
                newest_step = max(newest_step, decode(message.data, Cut).step)
                continue
            outcome = decode(message.data, Outcome)
        except WireError:
            continue
        if outcome.kind is not OutcomeKind.TRAINED:
            settled.append(_of_outcome(outcome, newest_step))
    stored: list[Entry] = []
    async for message in bus.find_messages(names.trajectories_stream, names.all_trajectories):
        try:
            group = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
        except WireError:
            continue  # rank 0's inbox makes it a dead letter
        stored += [
            _of_slot(
                slot, state=STORED if slot.status is SlotStatus.SCORED else str(slot.status), step=None,
                group=group.group_id, workflow=group.workflow, advantage=None, turns=None, near_step=newest_step + 1,
            )
            for slot in group.slots
        ]  # fmt: skip
    state, _ = await bus.get(RUN_STATE, RunState)
    if state is not None and state.state == "finished":
        over = f"{LEFT}: its run finished before it was trained"
        stored = [one._replace(state=LEFT, error=over) if one.state == STORED else one for one in stored]
    async for message in bus.find_messages(names.dead_stream, names.undecodable):
        try:
            settled.append(_of_letter(decode(message.data, DeadLetter), newest_step))
        except WireError:
            continue
    return stored + settled


async def read_stored(bus: Bus, wanted: Collection[str]) -> dict[str, Trajectory]:
    """Return stored trajectories, whole, by id; those that are stored no more or were damaged are not among them."""
    found = {}
    async for message in bus.find_messages(bus.names.trajectories_stream, bus.names.all_trajectories):
        with suppress(WireError):
            group = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            for slot in group.slots:
                name = f"{group.group_id}.{slot.sibling}"
                if name in wanted:
                    found[name] = decode_trajectory(message.data, slot)
    return found


async def find_stored(bus: Bus, entry: Entry) -> Trajectory:
    """Return a stored trajectory, whole.

    Raises:
        UserError: it is not stored any more, or was damaged.
    """
    stream, subject = bus.names.trajectories_stream, bus.names.trajectories(entry.workflow, entry.group)
    async for message in bus.find_messages(stream, subject):
        try:
            group = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            for slot in group.slots:
                if slot.sibling == entry.sibling:
                    return decode_trajectory(message.data, slot)
        except WireError as exc:
            raise UserError(f"--show {entry.id}: it cannot be read: {exc}") from exc
    raise UserError(f"--show {entry.id}: it is not stored any more; look again, it may be trained by now")


def select(
    trained: Iterable[Entry], others: Iterable[Entry], *, filters: Filters, sort: str, is_reversed: bool, limit: int
) -> list[Entry]:
    """Return the wanted entries in the wanted order; of the newest ones no more are read than are wanted.

    Args:
        trained: newest first.
        sort: ``newest``, or one of ``COLUMNS``, largest first; entries without a value come last.
        limit: 0 for all.
    """
    wanted_others = [entry for entry in others if filters.admit(entry)]
    chosen: Iterator[Entry] = filter(filters.admit, trained)
    if sort == "newest" and not is_reversed and limit:
        chosen = itertools.islice(chosen, limit)
    entries = [*wanted_others, *chosen]
    ids_trained = {entry.id for entry in entries if entry.state == TRAINED}
    # What a checkpoint does not hold yet is archived and still stored.
    entries = [entry for entry in entries if entry.state not in (STORED, LEFT) or entry.id not in ids_trained]
    if sort == "newest":
        entries.sort(key=lambda entry: entry.near_step, reverse=not is_reversed)
    else:
        value: Callable[[Entry], object] = lambda entry: getattr(entry, sort)  # noqa: E731
        with_value = [entry for entry in entries if value(entry) is not None]
        with_value.sort(key=value, reverse=not is_reversed)  # type: ignore[arg-type]
        entries = [*with_value, *(entry for entry in entries if value(entry) is None)]
    return entries[:limit] if limit else entries


def _of_slot(
    slot: Slot, *, state: str, step: int | None, group: str, workflow: str, advantage: float | None,
    turns: float | None, near_step: int,
) -> Entry:  # fmt: skip
    is_scored = slot.status is SlotStatus.SCORED
    return Entry(
        id=f"{group}.{slot.sibling}",
        state=state,
        step=step,
        group=group,
        sibling=slot.sibling,
        workflow=workflow,
        reward=slot.reward if is_scored else None,
        advantage=advantage,
        tokens=slot.num_tokens,
        output_tokens=slot.num_output_tokens,
        turns=None if turns is None else int(turns),
        oldest=slot.oldest,
        newest=slot.newest,
        error="" if is_scored else f"{slot.status}: {slot.reason}",
        truncated=slot.num_truncated,
        near_step=near_step,
    )


def _of_outcome(outcome: Outcome, newest_step: int) -> Entry:
    return _empty(
        id=outcome.group_id,
        state=str(outcome.kind),
        group=outcome.group_id,
        workflow=outcome.workflow,
        error=f"{outcome.kind}: {outcome.reason}" if outcome.reason else str(outcome.kind),
        near_step=newest_step,
    )._replace(step=outcome.step or None, reward=outcome.mean_reward)


def _of_letter(letter: DeadLetter, newest_step: int) -> Entry:
    *_, workflow, group = letter.subject.split(".")
    return _empty(
        id=group, state=UNDECODABLE, group=group, workflow=workflow, error=f"{UNDECODABLE}: {letter.reason}",
        near_step=newest_step,
    )  # fmt: skip


def _empty(*, id: str, state: str, group: str, workflow: str, error: str, near_step: int) -> Entry:
    return Entry(
        id=id, state=state, step=None, group=group, sibling=None, workflow=workflow, reward=None, advantage=None,
        tokens=None, output_tokens=None, turns=None, oldest="", newest="", error=error, truncated=None,
        near_step=near_step,
    )  # fmt: skip
