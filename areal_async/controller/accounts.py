"""Credit: groups admitted minus groups settled, and what is to be admitted next.

Pure: everything is derived from the log (``Journal``), the ``admitted`` record and the version that every
unfenced server holds. A trained group settles when those servers hold the weights of its step, and not when
its outcome is written; any other outcome settles its group when it is recorded.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from areal_async.protocol.fields import Count
from areal_async.protocol.id_sets import GroupIds, GroupIdsState
from areal_async.protocol.journal import Journal, JournalState, without_slots
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import Admitted, Cut, GroupId, Outcome, OutcomeKind, Version

GIVEN_UP = (OutcomeKind.ABANDONED, OutcomeKind.ROLLED_BACK)
"""Ends that say nothing of the group itself."""
RUN_ENDED = "the run ended first"
"""The reason of a group that the run's end found unsettled."""
ENDED_EARLY = "its name was used before it was admitted"
"""The reason of a group that had an end before it could have a ticket: whoever may store trajectories may name any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readmission:
    """The next attempt at a prompt whose last attempt did not end for good."""

    group_id: GroupId
    num_failed_attempts: int


class AccountsState(msgspec.Struct, kw_only=True):
    """What ``Accounts`` have read of the log, as plain values."""

    journal: JournalState
    cuts: list[Cut]
    """The journal's, as the books have them."""
    num_consecutive_failed: Count
    last_failure: str
    untrained: dict[str, Count]
    last_untrained: str
    readmissions: list[int]
    readmitted: GroupIdsState
    ended_early: GroupIdsState
    again_after_death: list[str]
    num_settled_untrained: Count


class Readmissions:
    """Readmissions in a list that only grows, 32 bytes each."""

    _WIDTH = 4

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """``numbers``: as of another one."""
        self._numbers = array("q", numbers)

    @property
    def numbers(self) -> list[int]:
        """What it holds, as plain values."""
        return list(self._numbers)

    def append(self, item: Readmission) -> None:
        """Add a readmission."""
        group = item.group_id
        self._numbers.extend((group.epoch, group.index, group.attempt, item.num_failed_attempts))

    def __len__(self) -> int:
        return len(self._numbers) // self._WIDTH

    def __getitem__(self, part: slice) -> list[Readmission]:
        """Return some of them."""
        starts = (place * self._WIDTH for place in range(*part.indices(len(self))))
        items = (self._numbers[start : start + self._WIDTH] for start in starts)
        return [Readmission(group_id=GroupId(*group), num_failed_attempts=failed) for *group, failed in items]


@dataclass(slots=True)
class Accounts:
    """The controller's books."""

    max_groups_in_flight: int
    journal: Journal = field(default_factory=Journal)
    admitted: Admitted = field(default_factory=Admitted)
    held: Version | None = None
    """Oldest version among unfenced servers; None while no server holds an announced one."""
    num_consecutive_failed: int = 0
    last_failure: str = ""
    untrained: Counter[str] = field(default_factory=Counter)
    """Groups that have ended otherwise than trained since the last cut, by how; not those that were only given up."""
    last_untrained: str = ""
    """Why the last one of them ended so."""
    readmissions: Readmissions = field(default_factory=Readmissions)
    """Every re-admission ever due, in the order of the log; ``admitted.num_readmitted`` is the cursor."""
    readmitted: GroupIds = field(default_factory=GroupIds)
    """Names of all re-admissions ever due."""
    ended_early: GroupIds = field(default_factory=GroupIds)
    """Groups in a cut or with an outcome that did not count, as they were not admitted."""
    again_after_death: set[GroupId] = field(default_factory=set)
    """Dead groups that the operator has had tried again."""
    _num_settled_untrained: int = 0

    def add_cut(self, entry: Cut, *, sequence: int) -> None:
        """Read a journal entry. Its slots are not kept: the books need no more than the groups' names."""
        in_time = (None, OutcomeKind.TRAINED)
        groups = [one for one in without_slots(entry).groups if self.journal.end_of(one.group_id) in in_time]
        if self.journal.add_cut(msgspec.structs.replace(entry, groups=groups), sequence=sequence) and groups:
            self.num_consecutive_failed = 0
            self.untrained.clear()

    def add_outcome(self, outcome: Outcome) -> None:
        """Read an outcome."""
        if outcome.kind is OutcomeKind.READMITTED:
            self._readmit_dead(outcome.group_id)
            return
        if outcome.reason == ENDED_EARLY:  # whatever its first end is to those who read it now that it is admitted
            self._readmit(outcome.group_id, num_failed_attempts=outcome.num_failed_attempts)
        if not self.journal.add_outcome(outcome) or outcome.kind is OutcomeKind.TRAINED:
            return
        self.journal.remove_from_cuts(outcome.group_id)
        self._num_settled_untrained += 1
        if outcome.kind not in GIVEN_UP:
            self.untrained[outcome.kind.value] += 1
            self.last_untrained = outcome.reason
        if outcome.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD):
            self.num_consecutive_failed = 1 if outcome.num_whole_before else self.num_consecutive_failed + 1
            self.last_failure = outcome.reason
        elif outcome.kind not in GIVEN_UP:
            self.num_consecutive_failed = 0
        if outcome.kind.readmits:
            self._readmit(outcome.group_id, num_failed_attempts=outcome.num_failed_attempts)

    def state(self) -> AccountsState | None:
        """Return what was read of the log as plain values; None where the journal has none."""
        journal = self.journal.state()
        if journal is None:
            return None
        return AccountsState(
            journal=journal,
            cuts=list(self.journal.cuts.values()),
            num_consecutive_failed=self.num_consecutive_failed,
            last_failure=self.last_failure,
            untrained=dict(self.untrained),
            last_untrained=self.last_untrained,
            readmissions=self.readmissions.numbers,
            readmitted=self.readmitted.state(),
            ended_early=self.ended_early.state(),
            again_after_death=sorted(map(str, self.again_after_death)),
            num_settled_untrained=self._num_settled_untrained,
        )

    def restore(self, state: AccountsState) -> None:
        """Go on from where ``state`` was taken, as if the log up to there had been read.

        Raises:
            ValueError: it is none; nothing was changed.
        """
        journal = Journal.of_state(state.journal, state.cuts)
        readmitted, ended_early = GroupIds.of_state(state.readmitted), GroupIds.of_state(state.ended_early)
        again = {GroupId.parse(name) for name in state.again_after_death}
        self.readmissions = Readmissions(state.readmissions)
        self.journal, self.readmitted, self.ended_early, self.again_after_death = (
            journal, readmitted, ended_early, again,
        )  # fmt: skip
        self.num_consecutive_failed, self.last_failure = state.num_consecutive_failed, state.last_failure
        self.untrained, self.last_untrained = Counter(state.untrained), state.last_untrained
        self._num_settled_untrained = state.num_settled_untrained

    def _readmit_dead(self, group_id: str) -> None:
        """Try a dead group again where an operator asks for it, once: its prompt has all of its attempts anew."""
        group = GroupId.parse(group_id)
        if self.is_dead(group_id) and group not in self.again_after_death:
            self.again_after_death.add(group)
            self._readmit(group_id, num_failed_attempts=0)

    def _readmit(self, group_id: str, *, num_failed_attempts: int) -> None:
        item = Readmission(group_id=GroupId.parse(group_id).next_attempt, num_failed_attempts=num_failed_attempts)
        if str(item.group_id) not in self.readmitted:
            self.readmitted.add(str(item.group_id))
            self.readmissions.append(item)

    def is_dead(self, group_id: str) -> bool:
        """Say whether a group ended ``dead``, whatever was asked for its prompt since."""
        return self.journal.end_of(group_id) is OutcomeKind.DEAD

    def hold(self, servers: Iterable[ServerState], *, newest: Version | None) -> None:
        """Take note of what the servers run.

        A version beyond the ``newest`` that was announced is no server's, whatever it says: groups admitted under it
        would be refused, one after another.
        """
        told = {server.version for server in servers if server.version and not server.fenced}
        versions = map(Version.parse, told)  # of many servers there are few
        self.held = min((one for one in versions if newest is not None and one <= newest), default=None)

    @property
    def held_step(self) -> int:
        """The step whose weights every unfenced server holds, as this lineage counts it.

        Weights of an older lineage stand for those of the same step, as far as this one has inherited them.
        """
        return self.journal.restored_step if self.held is None else self.step_of(self.held)

    def step_of(self, version: Version) -> int:
        """Return the step whose weights a version is, as this lineage counts it."""
        if version.lineage < self.journal.lineage:
            return min(self.journal.last_shared_step(version), self.journal.restored_step)
        return version.step

    def num_beyond(self, step: int) -> int:
        """Return how many admitted groups are neither settled nor in the cut of this step or an earlier one."""
        num_in_cuts = self.journal.num_cut_groups(through_step=step)
        return self.admitted.total - self._num_settled_untrained - num_in_cuts

    @property
    def num_settled(self) -> int:
        """Groups whose credit has returned."""
        return self._num_settled_untrained + self.journal.num_cut_groups(through_step=self.held_step)

    @property
    def num_in_flight(self) -> int:
        return self.admitted.total - self.num_settled

    @property
    def num_credits(self) -> int:
        """How many more groups may be admitted now."""
        return max(0, self.max_groups_in_flight - self.num_in_flight)

    @property
    def due_readmissions(self) -> list[Readmission]:
        """Readmissions of which the ``admitted`` record does not tell yet, in the order of the log."""
        return self.readmissions[self.admitted.num_readmitted :]
