"""What must hold whatever happens, judged from what was done and from nothing that the rules under test remember.

Everything is recomputed by other means: what weights are worth from the trajectories that went into them, what is
settled from the raw log, what was admitted from the tickets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_async.controller.sampler import Turns
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT
from areal_async.protocol.types import (
    Admitted,
    CheckpointRecord,
    Cut,
    CutKind,
    GroupId,
    Outcome,
    OutcomeKind,
    SlotStatus,
    StoredMessage,
    Ticket,
    Version,
)
from areal_async.trainer.batch.cut import OpenGroup
from areal_async.trainer.batch.planner import OVER_AGE

if TYPE_CHECKING:
    from tests.protocol.broker import LogEntry, ModelBus
    from tests.protocol.world import World

Content = tuple[frozenset[str], ...]
"""What weights were trained on: the sample uids of each step. Equal contents are equal weights."""

AGAIN = (OutcomeKind.FAILED, OutcomeKind.ABANDONED, OutcomeKind.ROLLED_BACK)
"""Ends after which a prompt is tried again."""
UNTRAINED_ENDS = (OutcomeKind.STALE, OutcomeKind.FILTERED, OutcomeKind.REJECTED, OutcomeKind.DEAD)


class Violation(AssertionError):
    """A promise was broken."""


def require(condition: bool, promise: str, detail: str) -> None:
    """Raise unless it holds."""
    if not condition:
        raise Violation(f"{promise}: {detail}")


class Oracle:
    """Looks on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._config = world.config
        self._lineage = 0
        self.weights: dict[Version, Content] = {}
        """Of every version that was ever made."""
        self._outcomes: dict[str, Outcome] = {}
        """The first settling outcome of each group that no fence took away."""
        self._tickets: dict[str, Ticket] = {}
        self._stored: dict[str, set[str]] = {}
        """group -> sample uids whose publish was acknowledged."""
        self._noted: set[str] = set()
        """Sample uids recorded as late or duplicate."""
        self._lost: set[str] = set()
        """Groups with a payload that a fault has destroyed."""
        self._had_mishap = False
        """A branch, a cut made short, a lost payload, a server older than the ticket: groups may be over the bound."""
        self._admitted = Admitted()
        self._order: list[tuple[int, int]] = []
        """The prompts, as they have their turn."""
        self._checkpoint: Content = ()
        self._taken_back: dict[str, int] = {}
        """Group that was trained in weights which the run went back behind -> the lineage that did so."""
        self.seen: Counter[str] = Counter()
        """How often each kind of thing has happened: to know what was explored."""

    # the log

    def on_log(self, entry: LogEntry) -> None:
        record = entry.record
        if isinstance(record, Cut):
            self.seen[f"entry {record.kind}"] += 1
            if record.kind is CutKind.BEGIN:
                self._lineage = max(self._lineage, record.lineage)
            self._had_mishap |= record.kind is CutKind.BRANCH
            self._had_mishap |= record.kind is CutKind.CUT and len(record.groups) < self._config.batch_groups
            return
        self.seen[f"outcome {record.kind}"] += 1
        if record.kind in (OutcomeKind.LATE, OutcomeKind.DUPLICATE):
            self._noted.add(record.sample_uid)
            return
        if entry.author and record.lineage < self._lineage:
            self.seen["outcome fenced"] += 1
            return
        before = self._outcomes.get(record.group_id)
        takes_back = record.kind is OutcomeKind.ROLLED_BACK and before and before.kind is OutcomeKind.TRAINED
        if before is not None and not takes_back:
            return
        require(record.group_id in self._tickets, "P7 covered", f"{record.group_id} ends, and was never admitted")
        self._outcomes[record.group_id] = record
        if record.reason == OVER_AGE and self._config.when_stale == "wait":
            require(self._had_mishap, "P7 length bias", f"{record.group_id} was not waited for under when_stale: wait")
        is_held = any(_group_of(uid) == record.group_id for step in self._checkpoint for uid in step)
        is_going = record.lineage < self._taken_back.get(record.group_id, 0)  # a newer lineage is about to begin
        if record.kind is OutcomeKind.TRAINED and not is_going:
            require(is_held, "P1 durable", f"{record.group_id} is recorded trained, and the checkpoint lacks it")
        if record.kind is OutcomeKind.ROLLED_BACK:
            require(not is_held, "P1 durable", f"{record.group_id} is rolled back, and the checkpoint holds it")
        if record.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD):
            self._check_attempts(record)

    def _check_attempts(self, outcome: Outcome) -> None:
        prompt = GroupId.parse(outcome.group_id)
        num_failed = sum(
            one.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD) and _is_same_prompt(one.group_id, prompt)
            for one in self._outcomes.values()
        )
        limit = self._config.max_attempts
        require(num_failed <= limit, "P7 attempts", f"{outcome.group_id}: {num_failed} failed, at most {limit}")
        is_last = num_failed == limit
        require(
            (outcome.kind is OutcomeKind.DEAD) == is_last,
            "P7 attempts",
            f"{outcome.group_id}: recorded {outcome.kind} after {num_failed} of {limit} failures",
        )

    # admission

    def on_ticket(self, ticket: Ticket) -> None:
        group = GroupId.parse(ticket.group_id)
        self.seen["ticket"] += 1
        if ticket.group_id in self._tickets:
            is_repeat = self._world.has_forgotten  # beyond the duplicate window a repeated publish is stored again
            require(is_repeat, "P7 covered", f"{ticket.group_id} was admitted twice")
            self.seen["ticket repeated"] += 1
            return
        self._tickets[ticket.group_id] = ticket
        if group.attempt:
            before = str(GroupId(group.epoch, group.index, group.attempt - 1))
            end = self._outcomes.get(before)
            is_due = end is not None and end.kind in AGAIN
            require(is_due, "P7 covered", f"{ticket.group_id} is tried again after {end.kind if end else 'nothing'}")
            self.seen["readmission"] += 1

    def on_key(self, key: str, record: Any, bus: ModelBus) -> None:
        """A compare-and-set is about to succeed."""
        if key == ADMITTED:
            self._check_admitted(record)
        elif key == CHECKPOINT and isinstance(record, CheckpointRecord) and record.path:
            is_fenced = 0 < bus.lineage < self._lineage
            require(not is_fenced, "P2 once", f"lineage {bus.lineage} records a checkpoint, {self._lineage} has begun")
            self._check_checkpoint(record, lineage=bus.lineage)

    def _check_admitted(self, record: Admitted) -> None:
        old, self._admitted = self._admitted, record
        counts = record.total, record.num_fresh, record.num_readmitted, record.num_skipped
        before = old.total, old.num_fresh, old.num_readmitted, old.num_skipped
        rewinds = any(now < then for now, then in zip(counts, before, strict=True))
        require(not rewinds, "P7 covered", f"the cursor rewinds from {old} to {record}")
        num_first = record.num_fresh - record.num_skipped
        require(record.total == num_first + record.num_readmitted, "P7 covered", f"{record} does not add up")
        require(self._config.keep is not None or not record.num_skipped, "P7 covered", f"{record} passes prompts over")
        self.seen["prompt passed over"] += record.num_skipped - old.num_skipped
        fresh = {(GroupId.parse(name).epoch, GroupId.parse(name).index) for name in self._tickets}
        # a prompt that was decided about twice, and otherwise, is one too many
        self._order += self._next_prompts(record, record.num_fresh - len(self._order))
        num_tickets = len(fresh & set(self._order))
        require(num_tickets == num_first, "P7 covered", f"{record}, but {num_tickets} of its prompts have tickets")
        if self._config.keep is None:
            out = fresh - {*self._order, *self._next_prompts(record, self._config.max_groups_in_flight)}
            require(not out, "P7 covered", f"{record}, and {out} have tickets, whose turn is not soon")
        self.seen["mix changed"] += bool(old.mixes) and record.mixes != old.mixes

    def _next_prompts(self, record: Admitted, count: int) -> list[tuple[int, int]]:
        """Return the prompts whose turn comes after those that were admitted; each task has epochs of its own."""
        rows = self._config.rows_of_tasks
        first_rows = [sum(rows[:task]) for task in range(len(rows))]
        visits = [
            sum(0 <= index - first < num for _, index in self._order)
            for first, num in zip(first_rows, rows, strict=True)
        ]
        prompts = []
        for position in range(len(self._order), len(self._order) + count):
            mix = [mix for mix in record.mixes if mix.start <= position][-1:]
            task = Turns(mix[0].weights).at(position - mix[0].start)[0] if mix else 0
            epoch, offset = divmod(visits[task], rows[task])
            visits[task] += 1
            seed = [1, epoch, task] if mix else [1, epoch]
            index = first_rows[task] + int(np.random.default_rng(seed).permutation(rows[task])[offset])
            prompts.append((epoch, index))
        return prompts

    def on_admission(self, *, total: int, log_length: int, held: Version, num_settled: int) -> None:
        """A controller admits, having read so much of the log, and seen that the servers hold this version.

        Args:
            num_settled: groups, by its books.
        """
        settled, cuts, lineage, restored_step, branches = set(), dict[int, set[str]](), 0, 0, dict[str, int]()
        for entry in self._world.broker.log[:log_length]:
            record = entry.record
            if record.lineage < lineage:
                continue
            if isinstance(record, Outcome):
                if record.kind.settles and record.kind is not OutcomeKind.TRAINED:
                    settled.add(record.group_id)
            elif record.kind is CutKind.BEGIN:
                lineage, restored_step = record.lineage, record.step
            elif record.kind in (CutKind.CUT, CutKind.BRANCH):
                first = record.step + (record.kind is CutKind.BRANCH)
                cuts = {step: groups for step, groups in cuts.items() if step < first}
                branches = record.branches
                if record.kind is CutKind.CUT:
                    cuts[record.step] = {group.group_id for group in record.groups}
        held_step = held.step
        if held.lineage < lineage:
            shared = [step for one, step in branches.items() if int(one) > held.lineage]
            held_step = min(held.step, restored_step, *shared)
        trained = {name for step, groups in cuts.items() if step <= held_step for name in groups}
        bound = (self._config.max_staleness + 1) * self._config.batch_groups
        counted = len(settled | trained)
        require(num_settled == counted, "credit", f"{num_settled} groups are settled by the books, {counted} are")
        in_flight = total - counted
        require(in_flight <= bound, "credit", f"{in_flight} groups in flight, at most {bound}")

    def on_ticket_acked(self, ticket: Ticket) -> None:
        stored = {_sibling_of(uid) for uid in self._stored.get(ticket.group_id, ())}
        is_whole = len(stored) == ticket.group_size
        is_settled = ticket.group_id in self._outcomes
        require(is_whole or is_settled, "P1 durable", f"ticket {ticket.group_id} acked with slots {sorted(stored)}")

    # trajectories

    def on_stored(self, message: StoredMessage) -> None:
        sampled = min(Version.parse(slot.oldest) for slot in message.slots)
        self._had_mishap |= sampled < Version.parse(message.ticket_version)  # by a node that another has replaced
        self._stored.setdefault(message.group_id, set()).update(slot.sample_uid for slot in message.slots)

    def on_lost(self, message: StoredMessage) -> None:
        self.seen["payload lost"] += 1
        self._lost.add(message.group_id)
        self._had_mishap = True

    def on_removed(self, message: StoredMessage, how: str) -> None:
        """A trainer has removed a message."""
        is_noted = all(slot.sample_uid in self._noted for slot in message.slots)
        is_recorded = is_noted or message.group_id in self._outcomes
        require(is_recorded, "P1 durable", f"{message.group_id} was {how} without an outcome")
        self.seen[f"trajectory {how}"] += 1

    def on_images_removed(self, group_id: str) -> None:
        """A trainer has removed a group's images."""
        require(group_id in self._outcomes, "P1 durable", f"images of {group_id} were removed without an outcome")
        self.seen["images removed"] += 1

    def on_shown(self, lineage: int, group_id: str) -> None:
        """A trainer looks for the image of a stored trajectory of a cut."""
        is_stored = group_id in self._world.broker.images
        require(is_stored or lineage < self._lineage, "P1 durable", f"{group_id} is to be trained without its image")

    def cut_messages(self) -> list[int]:
        """Return where the messages of groups in journalled cuts are: those whose loss leads to a branch."""
        cut = {
            group.group_id
            for entry in self._world.broker.log
            if isinstance(entry.record, Cut)
            for group in entry.record.groups
        }
        stored = self._world.broker.trajectories.items()
        return [sequence for sequence, message in stored if message.group_id in cut]

    # training

    def on_train(self, lineage: int, *, start: Content, slots: Iterable[Any], step: int) -> None:
        """A lineage's step is about to train these slots (``BatchSlot``)."""
        config = self._config
        trained = {(_group_of(uid), _sibling_of(uid)) for before in start for uid in before}
        groups: dict[str, set[int]] = {}
        require(step == len(start) + 1, "P2 once", f"step {step} starts from weights of step {len(start)}")
        for placed in slots:
            slot = placed.item.slot
            key = placed.group_id, slot.sibling
            require(key not in trained, "P2 once", f"slot {key} trains in step {step} and in one before")
            trained.add(key)
            is_over = lineage >= self._taken_back.get(placed.group_id, lineage + 1)
            require(not is_over, "rollback", f"{placed.group_id} trains in step {step}, and was taken back")
            groups.setdefault(placed.group_id, set()).add(slot.sibling)
            require(_group_of(slot.sample_uid) == placed.group_id, "P4 whole", f"{slot.sample_uid} is a neighbour's")
            require(slot.status is SlotStatus.SCORED, "P4 whole", f"{slot.sample_uid} is {slot.status}")
            if config.when_stale != "mask":
                age = self._age(Version.parse(slot.oldest), start)
                require(age <= config.max_staleness, "P3 fresh", f"{slot.sample_uid} has age {age} in step {step}")
        for group_id, siblings in groups.items():
            is_whole = config.min_group_size <= len(siblings) <= config.group_size
            require(is_whole, "P4 whole", f"{group_id} trains with {sorted(siblings)}")
        self.seen["step trained"] += 1

    def on_cut(self, cut: Cut, left: Iterable[OpenGroup]) -> None:
        """A cut is decided; what else is open and known to the trainer is left for later steps."""
        if self._config.when_stale != "wait" or cut.branches or cut.lineage < self._lineage:
            return
        for group in left:
            oldest = min(version.step for span in group.spans for version in span)
            age = cut.step - 1 - oldest
            require(age < self._config.max_staleness, "P7 length bias", f"{group.group_id} is due in step {cut.step}")

    def _age(self, version: Version, start: Content) -> int:
        """Count the steps from the weights that sampled to the common ancestor, and on to those that train."""
        sampled = self.weights[version]
        shared = 0
        while shared < min(len(sampled), len(start)) and sampled[shared] == start[shared]:
            shared += 1
        return (len(start) - shared) + (len(sampled) - shared)

    def on_weights(self, version: Version, content: Content) -> None:
        held = self.weights.setdefault(version, content)
        require(held == content, "P5 versioned", f"{version} names two different weights")

    def _check_checkpoint(self, record: CheckpointRecord, *, lineage: int) -> None:
        before, self._checkpoint = self._checkpoint, self._world.disk[record.path][1]
        if len(self._checkpoint) < len(before):
            self._on_going_back(lineage)
        ledger = self._world.disk[record.path][0]
        groups = {_group_of(uid) for step in self._checkpoint for uid in step}
        listed = {name for names in ledger.trained.values() for name in names}
        require(groups == listed, "P2 once", f"checkpoint {record.version} lists {listed}, and holds {groups}")

    def _on_going_back(self, lineage: int) -> None:
        """Note what was trained in any weights that have come of those that the run goes back to."""
        require(
            self._world.broker.rollback.is_due, "P2 once", f"lineage {lineage} goes back, and nobody has ordered it"
        )
        self.seen["went back"] += 1
        num_steps = len(self._checkpoint)
        for content in self.weights.values():
            if content[:num_steps] == self._checkpoint:
                groups = {_group_of(uid) for step in content[num_steps:] for uid in step}
                self._taken_back |= dict.fromkeys(groups - self._taken_back.keys(), lineage)

    # the end

    def check_end(self) -> None:
        """The run has ended: nothing is left in the dark."""
        final = self._checkpoint
        trained = {_group_of(uid) for step in final for uid in step}
        require(len(final) == self._config.steps, "end", f"the final weights hold {len(final)} steps")
        require(sum(map(len, final)) == len(set().union(*final)), "P2 once", "a slot is in two steps")
        still_stored = {message.group_id for message in self._world.broker.trajectories.values()}
        for group_id in self._stored:
            is_accounted = group_id in self._outcomes or group_id in still_stored or group_id in self._lost
            require(is_accounted or group_id in trained, "P1 durable", f"{group_id} is gone without a word")
        for group_id, outcome in self._outcomes.items():
            if outcome.kind is OutcomeKind.TRAINED:
                require(group_id in trained, "P1 durable", f"{group_id} is recorded trained, the final weights lack it")
            elif group_id in trained:
                raise Violation(f"P2 once: {group_id} is in the final weights, and recorded {outcome.kind}")
        self._check_coverage(trained)

    def _check_coverage(self, trained: set[str]) -> None:
        last: dict[tuple[int, int], GroupId] = {}
        for name in self._tickets:
            group = GroupId.parse(name)
            last[group.epoch, group.index] = max(group, last.get((group.epoch, group.index), group))
        num_open = sum(str(group) not in self._outcomes and str(group) not in trained for group in last.values())
        num_counted = len(self._tickets) - self._admitted.total
        require(num_open <= num_counted, "P7 covered", f"{num_open} admitted prompts ended without an outcome")


def _group_of(uid: str) -> str:
    return uid.split(".")[0]


def _sibling_of(uid: str) -> int:
    return int(uid.split(".")[1])


def _is_same_prompt(name: str, prompt: GroupId) -> bool:
    group = GroupId.parse(name)
    return (group.epoch, group.index) == (prompt.epoch, prompt.index)
