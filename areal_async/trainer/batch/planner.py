"""The one owner of batch assembly: which groups are open, how each ends, and what is done next about the journal.

Pure and deterministic: it is told what has come, decides, and carries nothing out. Whoever asks (``BatchFeed``, the
model of the protocol) does as ``decide`` says, reports it (``note_written``, ``note_recorded``), and asks again.

Invariants: a group is in one cut at most, and only in one for whose step all its tokens are fresh enough. A slot
counts once, even if it is delivered again. A group's end is recorded once per lineage, and nothing of a group is handed
over to be acked before its outcome is stored; a trained group's outcome waits for its checkpoint.

What it keeps of groups that have ended are numbers, nearly all of which follow one another (``id_sets``). They tell
what is late of a group, however long ago it ended.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic

from areal_async.config.live import step_numbers
from areal_async.config.settings import RolloutSettings, Settings
from areal_async.errors import FencedError
from areal_async.protocol.journal import Journal
from areal_async.protocol.staleness import oldest_age_at
from areal_async.protocol.types import (
    Cut,
    CutGroup,
    CutKind,
    Outcome,
    OutcomeKind,
    SlotStatus,
    StoredMessage,
    Ticket,
    Version,
    mean,
)
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.cut import Decision, OpenGroup, RetryLater, Settle, SpanAge, StreamRoom
from areal_async.trainer.batch.messages import D, UnackedMessages

OVER_AGE = "older than max_staleness"
MAX_NAMED = 3
"""Groups named when saying what is waited for."""
NOT_TRAINED = (OutcomeKind.FILTERED, OutcomeKind.STALE)
"""Ends of whole groups that are not trained: their outcome says what their rewards were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPlan:
    """Groups that a step would train, and those that it still waits for."""

    taken: list[OpenGroup]
    stale: list[OpenGroup]
    """Complete, but too old for this step: never trained."""
    waits_for: list[OpenGroup]
    """Groups that are due and incomplete."""
    num_missing: int
    """Number of complete groups still wanted to fill the batch."""

    @property
    def is_ready(self) -> bool:
        return not self.waits_for and self.num_missing == 0


class BatchPlanner(Generic[D]):
    """The groups of one lineage, from their tickets to the acks, and the next entry of its journal."""

    def __init__(self, settings: Settings, journal: Journal, *, lineage: int) -> None:
        """Begin from a journal: groups that it has cut, given up or ended are not cut again."""
        self.settings = settings
        """Of the next cut: some may change in a run. Groups too old for a lower bound are tried again."""
        self.lineage = lineage
        self.step = 1
        """The next step to be cut."""
        self.is_stopping = False
        """Cut nothing more: the journal's next entry ends the lineage."""
        self.has_ended = False
        self.image_room = StreamRoom.AMPLE
        """In the stream of images, where groups are in the way that have no slot yet."""
        self.is_caught_up = False
        """Messages that were stored before this lineage began have come."""
        self.open: dict[str, OpenGroup] = {}
        self.messages: UnackedMessages[D] = UnackedMessages()
        self.unacked_cuts: dict[int, Cut] = {}
        """Cuts that no checkpoint holds yet, by step."""
        self._branches = dict(journal.branches)
        """Where lineages parted."""
        self._allowed_step = 0
        self._asked_step = 0
        """The last step before which a checkpoint was asked for."""
        self._waiting_since: dict[str, float] = {}
        self._recorded = deepcopy(journal.settled)
        """Groups with a settling outcome."""
        self._closed = deepcopy(journal.settled)
        """Groups in a cut or with a settling outcome: nothing more that comes for them is trained."""
        self._in_cuts: dict[str, CutGroup] = {}
        """Groups in cuts that no checkpoint holds, should they fall out."""
        given_up = journal.without_end()
        self._given_up = dict.fromkeys(group.group_id for group in given_up)
        """Groups of cuts that were given up, and this is not recorded yet."""
        in_cuts = (group for cut in journal.cuts.values() for group in cut.groups)
        ends = ((group.group_id, journal.end_of(group.group_id)) for group in (*given_up, *in_cuts))
        self._was_trained = {group_id for group_id, end in ends if end is OutcomeKind.TRAINED}
        """Groups that are recorded trained, in cuts that were given up or may be."""
        self._num_known = self._num_whole = self._num_stale = self._num_failed = 0
        self._take(given_up)
        for _, cut in sorted(journal.cuts.items()):
            self.hold(cut)

    # what it is told

    def allow(self, step: int) -> None:
        """Let it cut up to ``step``."""
        self._allowed_step = max(self._allowed_step, step)

    def add_ticket(self, ticket: Ticket, *, stored_ns: int = 0) -> bool:
        """Note an admission, and when it was stored by the broker's clock; say whether it was news."""
        is_new = ticket.group_id not in self._closed and ticket.group_id not in self.open
        if is_new:
            self._open(ticket, ticket.version)
        if group := self.open.get(ticket.group_id):
            group.admitted_ns = stored_ns
        return is_new

    def receive(self, message: StoredMessage, delivery: D) -> list[Outcome]:
        """Take a stored message; return what is to be stored of its slots that cannot be used. It settles nothing."""
        if not self.messages.add(message, delivery):
            return []
        is_new = not self.messages.has_come(message.sequence) and self.is_caught_up
        if message.group_id in self._closed:
            # What is delivered again may be what was trained; so may all that was there before this lineage.
            kind = OutcomeKind.LATE
            unusable = [slot for slot in message.slots if is_new and slot.status is SlotStatus.SCORED]
        else:
            if message.group_id not in self.open:
                self._open(message, message.ticket_version)
            kind = OutcomeKind.DUPLICATE
            unusable = self.open[message.group_id].add(message)
        return [
            Outcome(group_id=message.group_id, kind=kind, lineage=self.lineage, sample_uid=slot.sample_uid)
            for slot in unusable
        ]

    def note_written(self, entry: Cut) -> None:
        """Go on from an entry that is in the journal."""
        if entry.kind is CutKind.END:
            self.has_ended = True
        elif entry.kind is CutKind.CHECKPOINT:
            self._asked_step = self.step
        else:
            self.hold(entry)
            self._waiting_since.clear()
            self.step = entry.step + 1

    def hold(self, cut: Cut) -> None:
        """Take a journalled cut: its groups wait for the checkpoint that will contain them."""
        self.unacked_cuts[cut.step] = cut
        self._take(cut.groups)

    def note_recorded(self, outcomes: Iterable[Outcome]) -> None:
        """Note outcomes that are stored: what has come for their groups may be acked from now on."""
        for outcome in outcomes:
            self._recorded.add(outcome.group_id)
            self._was_trained.discard(outcome.group_id)
            self._given_up.pop(outcome.group_id, None)
            self._num_stale += outcome.kind is OutcomeKind.STALE
            if outcome.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD):
                self._num_failed += 1
                self._num_whole = 0

    # what it is asked

    def is_cut(self, group_id: str) -> bool:
        """Say whether a group is in a cut that no checkpoint holds."""
        return group_id in self._in_cuts

    def is_closed(self, group_id: str) -> bool:
        """Say whether nothing more that comes for a group is trained."""
        return group_id in self._closed

    def is_over(self, group_id: str) -> bool:
        """Say whether a group's outcome is stored, and nothing that has come for it is held for its ack."""
        return group_id in self._recorded and group_id not in self.messages.deliveries

    @property
    def has_nothing(self) -> bool:
        """Whether no group is open, in a cut that no checkpoint holds, or held for its ack."""
        return not (self.open or self.unacked_cuts or self.messages.deliveries)

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped as stale, and how many failed, since the last call."""
        counts = self._num_stale, self._num_failed
        self._num_stale = self._num_failed = 0
        return counts

    def branch(self, *, after_step: int) -> Cut:
        """Return the entry that gives up the cuts beyond ``after_step``.

        Ages count on both sides of that step from now on.
        """
        self._branches[str(self.lineage)] = after_step
        return Cut(kind=CutKind.BRANCH, lineage=self.lineage, step=after_step, branches=dict(self._branches))

    def give_up_cuts(self, *, after_step: int) -> dict[int, list[str]]:
        """Let go of the cuts beyond ``after_step``, which no checkpoint will contain; return their groups by step."""
        steps = [step for step in self.unacked_cuts if step > after_step]
        return {step: [group.group_id for group in self.unacked_cuts.pop(step).groups] for step in sorted(steps)}

    def decide(self, *, now: float, room: StreamRoom) -> Decision:
        """Say what is to be done next.

        Args:
            now: seconds, of a clock that only goes on.
            room: in the stream of trajectories.

        Raises:
            FencedError: what is stored was sampled with the weights of a newer lineage.
        """
        room = min(room, self.image_room)
        if left := list(self._given_up):
            return Settle(left, OutcomeKind.ABANDONED, "its cut was given up")
        if self.is_stopping or self.step > self.settings.run.steps:
            return Cut(kind=CutKind.END, lineage=self.lineage, step=self.step)
        if self.step > self._allowed_step:
            return RetryLater(f"step {self._allowed_step} to be trained, before cutting step {self.step}")
        unfit = self._first_unfit()
        if unfit is not None:
            return unfit
        plan = plan_cut(self.open.values(), self.settings.rollout, age=self._age(self._branches))
        if plan.stale:
            return self._too_old(plan.stale)
        if room is not StreamRoom.AMPLE and self.unacked_cuts and self._asked_step < self.step:
            return Cut(kind=CutKind.CHECKPOINT, lineage=self.lineage, step=self.step - 1)
        if plan.is_ready:
            return self._cut(plan)
        made = None if room is StreamRoom.AMPLE else self._make_room(plan, room)
        return made or self._overdue(plan, now) or self._wait(plan)

    # what is to be done: store what the first two return, then ack what the last three return

    def of_checkpoint(self, step: int) -> list[Outcome]:
        """Return what is to be stored of the groups that the checkpoint of ``step`` contains.

        It must be on disk, and the newest by the bucket. Groups that fell out of their cut have an outcome
        already, which stays.
        """
        return [
            Outcome(group_id=group.group_id, kind=OutcomeKind.TRAINED, lineage=self.lineage, step=cut.step)
            for cut in self._cuts_through(step)
            for group in cut.groups
            if group.group_id not in self._recorded
        ]

    def of_untrained(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> list[Outcome]:
        """End groups without training them; return what is to be stored of it.

        Of those that are recorded trained, only what is given up has another end.
        """
        gives_up = kind is OutcomeKind.ABANDONED
        outcomes = [
            self._untrained(group_id, kind, reason=reason, step=step)
            for group_id in group_ids
            if group_id not in self._recorded or (gives_up and group_id in self._was_trained)
        ]
        self._close(outcome.group_id for outcome in outcomes)
        return outcomes

    def release(self, group_ids: Iterable[str]) -> list[D]:
        """Hand over, to be acked, what has come for those groups whose outcome is stored."""
        return self.messages.release(group_id for group_id in group_ids if group_id in self._recorded)

    def release_received(self, message: StoredMessage, unusable: Sequence[Outcome]) -> list[D]:
        """Hand over what can be acked now that a message has come, and what is ``unusable`` of it is recorded.

        A message without a slot that is used is not kept for its group's checkpoint: the stream has better use for
        the room.
        """
        if len(unusable) == len(message.slots):
            return self.messages.release_message(message)
        return self.release([message.group_id])

    def release_cuts(self, step: int) -> list[D]:
        """Hand over, to be acked, what the checkpoint of ``step`` contains."""
        groups = []
        for cut in self._cuts_through(step):
            del self.unacked_cuts[cut.step]
            groups += [group.group_id for group in cut.groups]
        for group_id in groups:
            self._in_cuts.pop(group_id, None)
        return self.release(groups)

    # inside: groups

    def _open(self, told: Ticket | StoredMessage, version: str) -> None:
        self._num_known += 1
        self.open[told.group_id] = OpenGroup(
            group_id=told.group_id,
            workflow=told.workflow,
            group_size=told.group_size,
            ticket_version=Version.parse(version),
            num_failed_attempts=told.num_failed_attempts,
            order=self._num_known,
        )

    def _take(self, groups: Sequence[CutGroup]) -> None:
        """Take groups that were cut once: they are not cut again."""
        self._close(group.group_id for group in groups)
        self._in_cuts.update({group.group_id: group for group in groups})

    def _close(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self.open.pop(group_id, None)
            self._closed.add(group_id)

    def _cuts_through(self, step: int) -> list[Cut]:
        return [cut for number, cut in sorted(self.unacked_cuts.items()) if number <= step]

    def _untrained(self, group_id: str, kind: OutcomeKind, *, reason: str, step: int) -> Outcome:
        group = self.open.get(group_id) or self._in_cuts.get(group_id)
        if group_id in self._was_trained:
            kind = OutcomeKind.ROLLED_BACK
        num_failed = group.num_failed_attempts if group else 0
        scored = group.scored if isinstance(group, OpenGroup) and kind in NOT_TRAINED else []
        if kind is OutcomeKind.FAILED:
            num_failed += 1
            if num_failed >= self.settings.rollout.max_attempts:
                kind = OutcomeKind.DEAD
        return Outcome(
            group_id=group_id,
            kind=kind,
            lineage=self.lineage,
            step=step,
            reason=reason,
            num_failed_attempts=num_failed,
            mean_reward=mean([item.slot.reward for item in scored]) if scored else None,
            num_whole_before=self._num_whole,
            workflow=group.workflow if group else "",
        )

    # inside: the next decision

    def _age(self, branches: Mapping[str, int]) -> SpanAge:
        step, lineage = self.step, self.lineage
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
        for group in self.open.values():
            if group.is_complete and not group.is_counted:
                if group.youngest_age(age) < 0:
                    reason = f"its tokens are of a version that step {self.step} comes before"
                    return Settle([group.group_id], OutcomeKind.ABANDONED, reason)
                verdict = group.verdict(
                    min_group_size=self.settings.rollout_of(group.workflow).min_group_size,
                    filters_equal=self.settings.algorithm.filter_equal_groups,
                )
                if verdict is not None:
                    return Settle([group.group_id], *verdict)
                group.is_counted = True
                self._num_whole += 1  # failures before and after it do not follow one another
        return None

    def _too_old(self, groups: list[OpenGroup]) -> Settle:
        """End groups over the bound. Those that no setting drops are tried again.

        Under ``wait`` a group gets there by a mishap alone, as by a branch, or when another fell out of its cut.
        """
        age, rollout = self._age({}), self.settings.rollout
        by_mishap = [
            group.group_id
            for group in groups
            if rollout.when_stale == "wait" or group.oldest_age(age) <= rollout.max_staleness
        ]
        if by_mishap:
            return Settle(by_mishap, OutcomeKind.ABANDONED, OVER_AGE)
        return Settle([group.group_id for group in groups], OutcomeKind.STALE, OVER_AGE)

    def _cut(self, plan: CutPlan) -> Cut:
        settings = self.settings
        return Cut(
            lineage=self.lineage,
            step=self.step,
            groups=[group.as_cut_group() for group in plan.taken],
            seed=(settings.run.seed << 32) + self.step,
            max_staleness=settings.rollout.max_staleness,
            lr=settings.trainer.lr,
            numbers=step_numbers(settings),
            masks_stale=settings.rollout.when_stale == "mask",
            branches=dict(self._branches),
        )

    def _make_room(self, plan: CutPlan, room: StreamRoom) -> Decision | None:
        """Free the stream at the least cost: by the checkpoint, a smaller batch, and only then finished work.

        A due group's producer may be among those that wait for room: waiting for it may never end.
        """
        if self.unacked_cuts:
            return RetryLater(f"the checkpoint of step {self.step - 1}, which makes room in the stream")
        if plan.taken and not plan.waits_for:
            return self._cut(plan)
        is_blocked = self.image_room is StreamRoom.NONE
        stored = [group for group in self.open.values() if group.slots or is_blocked]
        if room is StreamRoom.SCARCE or not stored:
            return None
        youngest = max(stored, key=lambda group: (not group.is_complete, group.order))
        kind = "complete" if youngest.is_complete else "incomplete"
        reason = f"the stream was full, and this was its youngest {kind} group"
        return Settle([youngest.group_id], OutcomeKind.ABANDONED, reason)

    def _wait(self, plan: CutPlan) -> RetryLater:
        incomplete = plan.waits_for or [group for group in self.open.values() if not group.is_complete]
        oldest = heapq.nsmallest(MAX_NAMED, incomplete, key=lambda group: group.order)
        on = tuple(wait_graph.group(group.group_id) for group in oldest)
        what_for = f"{plan.num_missing} more complete groups for step {self.step}"
        if due := plan.waits_for:
            named = ", ".join(group.group_id for group in due[:MAX_NAMED])
            stored, wanted = sum(len(group.slots) for group in due), sum(group.group_size for group in due)
            slots = f"{len(due)} groups, {stored} of {wanted} slots stored"
            what_for = f"due groups of step {self.step}: {named} ({slots})"
        return RetryLater(what_for, on or (wait_graph.ADMISSION,))

    def _overdue(self, plan: CutPlan, now: float) -> Settle | None:
        workflows = {group.workflow for group in plan.waits_for}
        by_workflow = {name: self.settings.rollout_of(name).group_deadline_s for name in workflows}
        deadlines = {group.group_id: by_workflow[group.workflow] for group in plan.waits_for}
        self._waiting_since = {group_id: self._waiting_since.get(group_id, now) for group_id in deadlines}
        waited = {group_id: now - since for group_id, since in self._waiting_since.items()}
        overdue = {group_id: deadlines[group_id] for group_id, wait_s in waited.items() if wait_s > deadlines[group_id]}
        if not overdue:
            return None
        deadline_s = min(overdue.values())  # those of another deadline are asked for next
        reason = f"still incomplete {deadline_s:g} s after the trainer began to wait for it"
        return Settle(sorted(name for name in overdue if overdue[name] == deadline_s), OutcomeKind.FAILED, reason)


def plan_cut(groups: Iterable[OpenGroup], rollout: RolloutSettings, *, age: SpanAge) -> CutPlan:
    """Choose the batch of one step.

    A group is *due* in the last step that its oldest version allows. Under ``when_stale: wait`` every due group goes
    into the cut, even beyond ``batch_groups``, and an incomplete one is waited for, so long answers are not starved;
    the room left goes to the oldest complete groups.

    Args:
        groups: open groups; complete ones must be able to train (``verdict`` is None).
        age: in the step that will use the batch.
    """
    max_staleness, when_stale = rollout.max_staleness, rollout.when_stale
    stale, due, others, waits_for = [], [], [], []
    for group in groups:
        oldest_age = group.oldest_age(age)
        if not group.is_complete:
            if when_stale == "wait" and oldest_age >= max_staleness:
                waits_for.append(group)
        elif oldest_age > max_staleness and (when_stale != "mask" or group.youngest_age(age) > max_staleness):
            stale.append(group)
        elif oldest_age >= max_staleness:
            due.append(group)
        else:
            others.append((-oldest_age, group.order, group))
    others.sort(key=lambda item: item[:2])
    room = max(0, rollout.batch_groups - len(due))
    taken = sorted(due, key=lambda group: group.order) + [group for _, _, group in others[:room]]
    return CutPlan(taken=taken, stale=stale, waits_for=waits_for, num_missing=max(0, rollout.batch_groups - len(taken)))
