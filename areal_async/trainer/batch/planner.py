"""What a trainer's rank 0 does next about its journal: settle groups, cut a batch, wait, or end.

Pure: decides over the inventory, carries out nothing. Whoever asks does as it is told, says so (``note_written``,
``GroupOutcomes.note_recorded``), and asks again.

Invariant: a group is in one cut at most, and only in one for whose step all its tokens are fresh enough.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from areal_async.errors import FencedError
from areal_async.protocol.staleness import oldest_age_at
from areal_async.protocol.types import Cut, CutKind, OutcomeKind, Version
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.cut import CutPlan, OpenGroup, SpanAge, plan_cut
from areal_async.trainer.batch.group_outcomes import GroupOutcomes

OVER_AGE = "older than max_staleness"
MAX_NAMED = 3
"""Groups named when saying what is waited for."""


class StreamRoom(IntEnum):
    """What is left of the stream of trajectories."""

    NONE = 0
    """A producer may be waiting for room."""
    SCARCE = 1
    """Nobody has to wait yet."""
    AMPLE = 2


class GroupRules(NamedTuple):
    """The settings that decide about one task's groups."""

    min_group_size: int
    group_deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRules:
    """The settings that decide about cuts."""

    last_step: int
    seed: int
    batch_groups: int
    min_group_size: int
    max_staleness: int
    when_stale: Literal["wait", "mask", "drop"]
    group_deadline_s: float
    """How long a due group is waited for."""
    lr: float = 0.0
    """As in ``Cut``."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """Likewise."""
    filters_equal_groups: bool = False
    """Train no group whose rewards are all equal."""
    of_task: Mapping[str, GroupRules] = field(default_factory=dict)
    """Workflow -> what is otherwise for its groups."""

    def of(self, group: OpenGroup) -> GroupRules:
        """Return what decides about a group."""
        return self.of_task.get(group.workflow) or GroupRules(self.min_group_size, self.group_deadline_s)


@dataclass(frozen=True, slots=True)
class Settle:
    """End these groups without training them."""

    group_ids: list[str]
    kind: OutcomeKind
    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """Add this entry to the journal."""

    entry: Cut


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Ask again when something has changed, or after a while."""

    what_for: str
    on: tuple[str, ...] = ()
    """Those who are waited for, as ``wait_graph`` names them; none for the trainer's own next step."""


Decision = Settle | Write | RetryLater


class BatchPlanner:
    """Decides, one step after another."""

    def __init__(self, rules: CutRules, fates: GroupOutcomes[Any], *, branches: Mapping[str, int]) -> None:
        """``branches``: where lineages parted, as the journal says."""
        self._rules = rules
        self._fates = fates
        self._inventory = fates.inventory
        self._branches = dict(branches)
        self._allowed_step = 0
        self._waiting_since: dict[str, float] = {}
        self._asked_step = 0
        """The last one before which a checkpoint was asked for."""
        self.step = 1
        """The next one to be cut."""
        self.is_stopping = False
        """Cut nothing more: the journal's next entry ends the lineage."""
        self.has_ended = False

    def allow(self, step: int) -> None:
        """Let it cut up to ``step``."""
        self._allowed_step = max(self._allowed_step, step)

    def change(self, *, max_staleness: int, lr: float, numbers: Mapping[str, float | None]) -> None:
        """Cut by these from now on. Groups that are too old for a lower bound are tried again."""
        self._rules = replace(self._rules, max_staleness=max_staleness, lr=lr, numbers=numbers)

    def branch(self, *, after_step: int) -> Cut:
        """Return the entry that gives up the cuts beyond ``after_step``.

        Ages count on both sides of that step from now on.
        """
        self._branches[str(self._fates.lineage)] = after_step
        return Cut(kind=CutKind.BRANCH, lineage=self._fates.lineage, step=after_step, branches=dict(self._branches))

    def note_written(self, entry: Cut) -> None:
        """Go on from an entry that is in the journal."""
        if entry.kind is CutKind.END:
            self.has_ended = True
        elif entry.kind is CutKind.CHECKPOINT:
            self._asked_step = self.step
        else:
            self._fates.hold(entry)
            self._waiting_since.clear()
            self.step = entry.step + 1

    def decide(self, *, now: float, room: StreamRoom) -> Decision:
        """Say what is to be done next.

        Args:
            now: seconds, of a clock that only goes on.
            room: of the stream of trajectories.

        Raises:
            FencedError: what is stored was sampled with the weights of a newer lineage.
        """
        rules = self._rules
        if self.is_stopping or self.step > rules.last_step:
            return Write(Cut(kind=CutKind.END, lineage=self._fates.lineage, step=self.step))
        if self.step > self._allowed_step:
            return RetryLater(f"step {self._allowed_step} to be trained, before cutting step {self.step}")
        unfit = self._first_unfit()
        if unfit is not None:
            return unfit
        plan = plan_cut(
            self._inventory.open.values(),
            age=self._age(self._branches),
            batch_groups=rules.batch_groups,
            max_staleness=rules.max_staleness,
            when_stale=rules.when_stale,
        )
        if plan.stale:
            return self._too_old(plan.stale)
        if room is not StreamRoom.AMPLE and self._fates.unacked_cuts and self._asked_step < self.step:
            return Write(Cut(kind=CutKind.CHECKPOINT, lineage=self._fates.lineage, step=self.step - 1))
        if plan.is_ready:
            return Write(self._cut(plan))
        made = None if room is StreamRoom.AMPLE else self._make_room(plan, room)
        return made or self._overdue(plan, now) or self._wait(plan)

    # inside

    def _age(self, branches: Mapping[str, int]) -> SpanAge:
        step, lineage = self.step, self._fates.lineage
        numbered = {int(number): shared for number, shared in branches.items()}

        def age(first: Version, last: Version) -> int:
            if last.lineage > lineage:
                raise FencedError(
                    f"lineage {lineage}: trajectories hold tokens of {last}; a newer trainer has taken over"
                )
            return oldest_age_at(step=step, first=first, last=last, lineage=lineage, branches=numbered)

        return age

    def _first_unfit(self) -> Settle | None:
        """Find a complete group that cannot train; count those that can."""
        age = self._age(self._branches)
        for group in self._inventory.open.values():
            if group.is_complete and not group.is_counted:
                if group.youngest_age(age) < 0:
                    reason = f"its tokens are of a version that step {self.step} comes before"
                    return Settle([group.group_id], OutcomeKind.ABANDONED, reason)
                verdict = group.verdict(
                    min_group_size=self._rules.of(group).min_group_size,
                    filters_equal=self._rules.filters_equal_groups,
                )
                if verdict is not None:
                    return Settle([group.group_id], *verdict)
                group.is_counted = True
                self._fates.count_whole()
        return None

    def _too_old(self, groups: list[OpenGroup]) -> Settle:
        """End groups over the bound. Those that no setting drops are tried again.

        Under ``wait`` a group gets there by a mishap alone, as by a branch, or when another fell out of its cut.
        """
        age = self._age({})
        by_mishap = [
            group.group_id
            for group in groups
            if self._rules.when_stale == "wait" or group.oldest_age(age) <= self._rules.max_staleness
        ]
        if by_mishap:
            return Settle(by_mishap, OutcomeKind.ABANDONED, OVER_AGE)
        return Settle([group.group_id for group in groups], OutcomeKind.STALE, OVER_AGE)

    def _cut(self, plan: CutPlan) -> Cut:
        rules = self._rules
        return Cut(
            lineage=self._fates.lineage,
            step=self.step,
            groups=[group.as_cut_group() for group in plan.taken],
            seed=(rules.seed << 32) + self.step,
            max_staleness=rules.max_staleness,
            lr=rules.lr,
            numbers=dict(rules.numbers),
            masks_stale=rules.when_stale == "mask",
            branches=dict(self._branches),
        )

    def _make_room(self, plan: CutPlan, room: StreamRoom) -> Decision | None:
        """Free the stream at the least cost: by the checkpoint, a smaller batch, and only then finished work.

        A due group's producer may be among those that wait for room, so waiting for it can be for ever.
        """
        if self._fates.unacked_cuts:
            return RetryLater(f"the checkpoint of step {self.step - 1}, which makes room in the stream")
        if plan.taken and not plan.waits_for:
            return Write(self._cut(plan))
        stored = [group for group in self._inventory.open.values() if group.slots]
        if room is StreamRoom.SCARCE or not stored:
            return None
        youngest = max(stored, key=lambda group: (not group.is_complete, group.order))
        kind = "complete" if youngest.is_complete else "incomplete"
        reason = f"the stream was full, and this was its youngest {kind} group"
        return Settle([youngest.group_id], OutcomeKind.ABANDONED, reason)

    def _wait(self, plan: CutPlan) -> RetryLater:
        incomplete = plan.waits_for or [group for group in self._inventory.open.values() if not group.is_complete]
        oldest = heapq.nsmallest(MAX_NAMED, incomplete, key=lambda group: group.order)
        on = tuple(wait_graph.group(group.group_id) for group in oldest)
        return RetryLater(_describe(self.step, plan), on or (wait_graph.ADMISSION,))

    def _overdue(self, plan: CutPlan, now: float) -> Settle | None:
        deadlines = {group.group_id: self._rules.of(group).group_deadline_s for group in plan.waits_for}
        self._waiting_since = {group_id: self._waiting_since.get(group_id, now) for group_id in deadlines}
        waited = {group_id: now - since for group_id, since in self._waiting_since.items()}
        overdue = {group_id: deadlines[group_id] for group_id, wait_s in waited.items() if wait_s > deadlines[group_id]}
        if not overdue:
            return None
        deadline_s = min(overdue.values())  # those of another deadline are asked for next
        reason = f"still incomplete {deadline_s:g} s after the trainer began to wait for it"
        return Settle(sorted(name for name in overdue if overdue[name] == deadline_s), OutcomeKind.FAILED, reason)


def _describe(step: int, plan: CutPlan) -> str:
    if plan.waits_for:
        named = ", ".join(group.group_id for group in plan.waits_for[:MAX_NAMED])
        stored = sum(len(group.slots) for group in plan.waits_for)
        wanted = sum(group.group_size for group in plan.waits_for)
        return f"due groups of step {step}: {named} ({len(plan.waits_for)} groups, {stored} of {wanted} slots stored)"
    return f"{plan.num_missing} more complete groups for step {step}"
