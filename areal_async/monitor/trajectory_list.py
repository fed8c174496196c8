"""The trajectories of a run, from wherever they are: the archive, the stream, and the log of what became of others.

The archive has what was trained and is read by headers alone, newest step first. The broker has what waits to be
trained, and the reasons of what never was; a run whose broker cannot be asked still has its archive.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_async.bus import Bus, Message
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
    """Step that trained it, or in which its outcome was found out."""
    group: str
    sibling: int | None = None
    workflow: str = ""
    reward: float | None = None
    advantage: float | None = None
    """Mean over its replies where they have their own."""
    tokens: int | None = None
    output_tokens: int | None = None
    """Sampled tokens."""
    turns: int | None = None
    oldest: str = ""
    newest: str = ""
    error: str = ""
    truncated: int | None = None
    """Turns that ended by length."""
    near_step: int = 0
    """The step that was newest when it was last heard of: its place in time."""

    @property
    def versions(self) -> str:
        """Versions of the weights that sampled it."""
        return self.oldest if self.oldest == self.newest else f"{self.oldest}..{self.newest}"


UNDECODABLE = "undecodable"
FAILED = (SlotStatus.FAILED, OutcomeKind.FAILED, OutcomeKind.DEAD, UNDECODABLE)
"""States of what was to be trained and broke, against what was withdrawn, filtered or came too late."""
COLUMNS = ("step", "group", "sibling", "workflow", "state", "reward", "advantage", "tokens", "turns", "truncated")
"""Facts by which a list can be sorted, besides ``newest``."""


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
        return all(
            (
                _is_within(entry.step, *(self.steps or (None, None))),
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
    turns = info.get(f"{OWN_INFO}num_turns", info.get("num_turns"))
    return _of_slot(recorded.trajectory.slot, recorded.group_id, recorded.workflow, near_step=step)._replace(
        state=TRAINED, step=step, advantage=recorded.advantage, turns=None if turns is None else int(turns)
    )


async def untrained(bus: Bus) -> list[Entry]:
    """Ask the broker for what waits to be trained, and for what became of all that was not."""
    names = bus.names
    newest_step = 0
    settled: list[Entry] = []
    async for message in bus.find_messages(names.outcomes_stream, names.log):
        with suppress(WireError):
            if message.subject == names.cuts:
                newest_step = max(newest_step, decode(message.data, Cut).step)
            elif (outcome := decode(message.data, Outcome)).kind is not OutcomeKind.TRAINED:
                entry = _of_group(outcome.group_id, outcome.workflow, str(outcome.kind), outcome.reason, newest_step)
                settled.append(entry._replace(step=outcome.step or None, reward=outcome.mean_reward))
    stored: list[Entry] = []
    async for message in bus.find_messages(names.trajectories_stream, names.all_trajectories):
        with suppress(WireError):  # rank 0's inbox makes it a dead letter
            group = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            stored += [
                _of_slot(slot, group.group_id, group.workflow, near_step=newest_step + 1) for slot in group.slots
            ]
    state, _ = await bus.get(RUN_STATE, RunState)
    if state is not None and state.state == "finished":
        over = f"{LEFT}: its run finished before it was trained"
        stored = [one._replace(state=LEFT, error=over) if one.state == STORED else one for one in stored]
    async for message in bus.find_messages(names.dead_stream, names.undecodable):
        with suppress(WireError):
            letter = decode(message.data, DeadLetter)
            *_, workflow, group_id = ("", *letter.subject.split("."))  # which may be anything
            settled.append(_of_group(group_id, workflow, UNDECODABLE, letter.reason, newest_step))
    return stored + settled


async def read_stored(bus: Bus, wanted: Collection[str]) -> dict[str, Trajectory]:
    """Return stored trajectories, whole, by id; those that are stored no more or were damaged are not among them."""
    found: dict[str, Trajectory] = {}
    async for message in bus.find_messages(bus.names.trajectories_stream, bus.names.all_trajectories):
        with suppress(WireError):
            found.update(_whole(message, wanted))
    return found


async def find_stored(bus: Bus, entry: Entry) -> Trajectory:
    """Return a stored trajectory, whole.

    Raises:
        UserError: it is not stored any more, or was damaged.
    """
    stream, subject = bus.names.trajectories_stream, bus.names.trajectories(entry.workflow, entry.group)
    async for message in bus.find_messages(stream, subject):
        try:
            for _, trajectory in _whole(message, [entry.id]):
                return trajectory
        except WireError as exc:
            raise UserError(f"--show {entry.id}: it cannot be read: {exc}") from exc
    raise UserError(f"--show {entry.id}: it is not stored any more; look again, it may be trained by now")


def _whole(message: Message, wanted: Collection[str]) -> Iterator[tuple[str, Trajectory]]:
    """Yield those of the wanted trajectories that are in a message, by id."""
    group = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
    for slot in group.slots:
        name = f"{group.group_id}.{slot.sibling}"
        if name in wanted:
            yield name, decode_trajectory(message.data, slot)


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
        value = operator.attrgetter(sort)
        with_value = sorted((one for one in entries if value(one) is not None), key=value, reverse=not is_reversed)
        entries = [*with_value, *(one for one in entries if value(one) is None)]
    return entries[:limit] if limit else entries


def _of_slot(slot: Slot, group: str, workflow: str, *, near_step: int) -> Entry:
    """Return the line of a slot that is stored and not trained."""
    is_scored = slot.status is SlotStatus.SCORED
    return Entry(
        id=f"{group}.{slot.sibling}",
        state=STORED if is_scored else str(slot.status),
        step=None,
        group=group,
        sibling=slot.sibling,
        workflow=workflow,
        reward=slot.reward if is_scored else None,
        tokens=slot.num_tokens,
        output_tokens=slot.num_output_tokens,
        oldest=slot.oldest,
        newest=slot.newest,
        error="" if is_scored else f"{slot.status}: {slot.reason}",
        truncated=slot.num_truncated,
        near_step=near_step,
    )


def _of_group(group: str, workflow: str, state: str, reason: str, near_step: int) -> Entry:
    """Return the line of a group of which only what became of it is left."""
    error = f"{state}: {reason}" if reason else state
    return Entry(id=group, state=state, step=None, group=group, workflow=workflow, error=error, near_step=near_step)
