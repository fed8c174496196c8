"""Faults planted into the protocol, one small mutation each: an exploration that misses one explores too little.

Most replace a piece of production code; those about the order of effects replace it in the model of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from areal_async.bus import take_trainer_consumer
from areal_async.bus.sweep import settled_prefix
from areal_async.config.settings import RolloutSettings
from areal_async.controller import admission
from areal_async.controller.accounts import Accounts, Readmission
from areal_async.controller.curriculum import Curriculum
from areal_async.controller.pacing import Pacer
from areal_async.controller.sampler import MixedSampler, RowPool, Sampler
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT, LINEAGE
from areal_async.protocol.types import (
    Admitted,
    CheckpointRecord,
    Cut,
    CutGroup,
    CutKind,
    CutSlot,
    GroupId,
    LineageRecord,
    Mix,
    Outcome,
    OutcomeKind,
    Slot,
    StoredMessage,
    Ticket,
)
from areal_async.trainer.batch import planner
from areal_async.trainer.batch.cut import OpenGroup, SpanAge
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.batch.planner import BatchPlanner, CutPlan, plan_cut
from tests.protocol.broker import NAMES, ModelBus, ModelImages, TicketDelivery
from tests.protocol.roles import ControllerModel, NodeModel
from tests.protocol.trainer import ModelLedger, TrainerModel

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, Plant] = {}
"""By name."""


def _planted(name: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        PLANTED[name] = plant
        return plant

    return register


@_planted("messages are acked before their group's outcome is stored")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchPlanner, "release", lambda self, group_ids: self.messages.release(group_ids))


@_planted("a trainer purges without asking whether a newer one has begun")
def _(patch: pytest.MonkeyPatch) -> None:
    async def is_newest(self: Lineage) -> bool:
        return True

    patch.setattr(Lineage, "is_newest", is_newest)


@_planted("a purge takes what lies before a settled message, received or not")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.protocol.trainer.settled_prefix", lambda stored, settled: max(settled))


@_planted("a purge takes what was settled after it was asked whether a newer trainer has begun")
def _(patch: pytest.MonkeyPatch) -> None:
    async def remove(self: TrainerModel, messages: Iterable[StoredMessage], *, has_room: bool = True) -> None:
        self.held.update({message.sequence: message for message in messages})
        if self.held and await self.lineage.is_newest():
            stored = await self.bus.list_stored()
            await self.bus.purge(settled_prefix(stored, self.held) - 1)

    patch.setattr(TrainerModel, "_remove", remove)


@_planted("outcomes and acks come before the checkpoint")
def _(patch: pytest.MonkeyPatch) -> None:
    right = TrainerModel._checkpoint

    async def checkpoint(self: TrainerModel) -> None:
        await self._on_checkpoint(self.step)
        await right(self)

    patch.setattr(TrainerModel, "_checkpoint", checkpoint)


@_planted("a checkpoint holds no list of what it was trained on")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.protocol.trainer.ModelLedger", lambda step, trained: ModelLedger(step, {}))


@_planted("a trained group settles twice: by its weights and by its outcome")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Accounts.add_outcome

    def add_outcome(self: Accounts, outcome: Outcome) -> None:
        right(self, outcome)
        self._num_settled_untrained += outcome.kind is OutcomeKind.TRAINED

    patch.setattr(Accounts, "add_outcome", add_outcome)


@_planted("credit returns when a cut is journalled, before the servers hold its weights")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "held_step", property(lambda self: self.journal.last_step))


@_planted("a cut goes without the due groups that are incomplete")
def _(patch: pytest.MonkeyPatch) -> None:
    def plan(groups: Iterable[OpenGroup], rollout: RolloutSettings, *, age: SpanAge) -> CutPlan:
        return replace(plan_cut(groups, rollout, age=age), waits_for=[])

    patch.setattr(planner, "plan_cut", plan)


@_planted("a cut takes groups over the bound")
def _(patch: pytest.MonkeyPatch) -> None:
    def plan(groups: Iterable[OpenGroup], rollout: RolloutSettings, *, age: SpanAge) -> CutPlan:
        return plan_cut(groups, rollout.model_copy(update={"max_staleness": rollout.max_staleness + 1}), age=age)

    patch.setattr(planner, "plan_cut", plan)


@_planted("rejected and stale groups are tried again")
def _(patch: pytest.MonkeyPatch) -> None:
    ended = (OutcomeKind.FAILED, OutcomeKind.ABANDONED, OutcomeKind.REJECTED, OutcomeKind.STALE)
    patch.setattr(OutcomeKind, "readmits", property(lambda self: self in ended))


@_planted("another attempt reuses the number of the one before")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Accounts.due_readmissions.fget
    assert right is not None

    def same(item: Readmission) -> Readmission:
        group = item.group_id
        return replace(item, group_id=GroupId(group.epoch, group.index, group.attempt - 1))

    patch.setattr(Accounts, "due_readmissions", property(lambda self: [same(item) for item in right(self)]))


@_planted("failed attempts are not counted")
def _(patch: pytest.MonkeyPatch) -> None:
    right = BatchPlanner._untrained

    def untrained(self: BatchPlanner[Any], group_id: str, kind: OutcomeKind, **rest: Any) -> Outcome:
        outcome = right(self, group_id, kind, **rest)
        return msgspec.structs.replace(outcome, kind=kind, num_failed_attempts=0)

    patch.setattr(BatchPlanner, "_untrained", untrained)


@_planted("a second producer's slot fills another sibling's place")
def _(patch: pytest.MonkeyPatch) -> None:
    def add(self: OpenGroup, message: StoredMessage) -> list[Slot]:
        for slot in message.slots:
            free = [sibling for sibling in range(self.group_size) if sibling not in self.slots]
            if free:
                self.slots[free[0]] = CutSlot(slot=slot, sequence=message.sequence)
        return []

    patch.setattr(OpenGroup, "add", add)


@_planted("a lineage begins without fencing the older ones")
def _(patch: pytest.MonkeyPatch) -> None:
    async def write_begin(self: Lineage) -> int:
        return 0

    patch.setattr(Lineage, "write_begin", write_begin)


@_planted("a zombie's cuts and outcomes count")
def _(patch: pytest.MonkeyPatch) -> None:
    right_cut, right_outcome = Journal.add_cut, Journal.add_outcome

    def add_cut(self: Journal, entry: Cut, *, sequence: int) -> bool:
        if entry.kind is not CutKind.BEGIN:
            entry = msgspec.structs.replace(entry, lineage=max(entry.lineage, self.lineage))
        return right_cut(self, entry, sequence=sequence)

    def add_outcome(self: Journal, outcome: Outcome) -> bool:
        return right_outcome(self, msgspec.structs.replace(outcome, lineage=max(outcome.lineage, self.lineage)))

    async def write_cut(self: Lineage, entry: Cut) -> int:
        published = await self._bus.publish(NAMES.cuts, entry)
        return published.sequence

    patch.setattr(Journal, "add_cut", add_cut)
    patch.setattr(Journal, "add_outcome", add_outcome)
    patch.setattr(Lineage, "write_cut", write_cut)


@_planted("an older trainer can still record a checkpoint")
def _(patch: pytest.MonkeyPatch) -> None:
    async def take(bus: Any) -> Lineage:
        record, revision = await bus.get(LINEAGE, LineageRecord)
        checkpoint, checkpoint_revision = await bus.get(CHECKPOINT, CheckpointRecord)
        lineage = Lineage(bus, number=(record.lineage if record else 0) + 1, checkpoint=checkpoint)
        lineage._revisions[CHECKPOINT] = checkpoint_revision
        await bus.compare_and_set(LINEAGE, LineageRecord(lineage=lineage.number), revision)
        await take_trainer_consumer(bus, lineage.number)
        return lineage

    patch.setattr(Lineage, "take", take)


@_planted("a restored trainer cuts anew instead of replaying")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "steps_to_replay", lambda self: [])


@_planted("the groups of inherited cuts can be cut again")
def _(patch: pytest.MonkeyPatch) -> None:
    right = BatchPlanner.hold

    def hold(self: BatchPlanner[Any], cut: Cut) -> None:
        if cut.lineage == self.lineage:
            right(self, cut)

    patch.setattr(BatchPlanner, "hold", hold)


@_planted("ages ignore that lineages have parted")
def _(patch: pytest.MonkeyPatch) -> None:
    right = BatchPlanner._age

    def age(self: BatchPlanner[Any], branches: Mapping[str, int]) -> SpanAge:
        ignorant = right(self, {})
        return lambda first, last: max(0, ignorant(first, last))  # below 0 another guard would be the one that finds it

    patch.setattr(BatchPlanner, "_age", age)


@_planted("the cursor of admissions is written without comparing")
def _(patch: pytest.MonkeyPatch) -> None:
    right = ModelBus.compare_and_set

    async def compare_and_set(self: ModelBus, key: str, record: Any, revision: int) -> int:
        if key == ADMITTED:
            revision = self._broker.keys.get(key, (None, 0))[1]
        return await right(self, key, record, revision)

    patch.setattr(ModelBus, "compare_and_set", compare_and_set)


@_planted("the cursor moves before the tickets are stored")
def _(patch: pytest.MonkeyPatch) -> None:
    async def admit(self: ControllerModel, admission: Any) -> None:
        self.revision = await self.bus.compare_and_set(ADMITTED, admission.record, self.revision)
        self.accounts.admitted = admission.record
        await self._publish_tickets(admission)

    patch.setattr(ControllerModel, "_admit", admit)


@_planted("a ticket is acked before all its slots are stored")
def _(patch: pytest.MonkeyPatch) -> None:
    right = NodeModel._run_ticket

    async def run_ticket(self: NodeModel, delivery: TicketDelivery) -> None:
        await self.process.bus.ack_ticket(delivery)
        await right(self, delivery)

    patch.setattr(NodeModel, "_run_ticket", run_ticket)


@_planted("a controller that ends the run trusts the cursor it remembers")
def _(patch: pytest.MonkeyPatch) -> None:
    right = ControllerModel.take_over

    async def take_over(self: ControllerModel) -> int:
        return 0 if self.is_over else await right(self)

    patch.setattr(ControllerModel, "take_over", take_over)


@_planted("a controller that begins leaves the record to another one")
def _(patch: pytest.MonkeyPatch) -> None:
    right = ControllerModel.take_over

    async def take_over(self: ControllerModel) -> int:
        if self.is_over:
            return await right(self)
        record, revision = await self.bus.get(ADMITTED, Admitted)
        self.accounts.admitted = record or Admitted()
        return revision

    patch.setattr(ControllerModel, "take_over", take_over)


@_planted("the checkpoint's groups are settled before any server holds its weights")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Accounts.held_step.fget
    assert right is not None
    patch.setattr(Accounts, "held_step", property(lambda self: max(right(self), self.journal.restored_step)))


@_planted("a curriculum decides by what is known by now")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Curriculum._admits

    def admits(self: Curriculum, group: GroupId, number: int, pool: RowPool, stretch: str, known: Any) -> bool:
        self._dull.clear()
        return right(self, group, number, pool, stretch, dict.fromkeys(known, len(self.visits)))

    patch.setattr(Curriculum, "_admits", admits)


@_planted("what was passed over is abandoned at the end")
def _(patch: pytest.MonkeyPatch) -> None:
    def every(admitted: Admitted, sampler: Sampler, curriculum: Any) -> Iterable[GroupId]:
        return sampler.first_groups(admitted.num_fresh)

    patch.setattr("areal_async.controller.admission.first_groups", every)


@_planted("another mix begins at once")
def _(patch: pytest.MonkeyPatch) -> None:
    right = MixedSampler.remixed

    def remixed(self: MixedSampler, mixes: Any, weights: Any, *, now: int, start: int) -> list[Mix]:
        return right(self, mixes, weights, now=now, start=now)

    patch.setattr(MixedSampler, "remixed", remixed)


@_planted("tickets are chosen by another mix before it is on record")
def _(patch: pytest.MonkeyPatch) -> None:
    right = admission.next_admission

    def next_admission(accounts: Accounts, *arguments: Any, **keywords: Any) -> Any:
        made = right(accounts, *arguments, **keywords)
        if made is None or made.record.mixes == accounts.admitted.mixes:
            return made
        before, accounts.admitted = accounts.admitted, made.record
        made = right(accounts, *arguments, **keywords)
        accounts.admitted = before
        return made

    patch.setattr("tests.protocol.roles.next_admission", next_admission)


@_planted("a purge is decided by what an old leader says of the journal")
def _(patch: pytest.MonkeyPatch) -> None:
    async def is_mine(self: Lineage) -> bool:
        return True

    patch.setattr(Lineage, "_is_mine", is_mine)
    _have_followers_asked(patch)


@_planted("a trainer reads the log from a follower")
def _(patch: pytest.MonkeyPatch) -> None:
    _have_followers_asked(patch)


@_planted("a trainer takes for lost what a follower has not heard of")
def _(patch: pytest.MonkeyPatch) -> None:
    right = TrainerModel._fetch

    async def fetch(self: TrainerModel, cut: Cut) -> tuple[list[BatchSlot], list[tuple[str, int]]]:
        slots, missing = await right(self, cut)
        if self.world.old_reach(0, len(slots)) < len(slots):
            missing = [placed.key for placed in slots]
        return slots, missing

    patch.setattr(TrainerModel, "_fetch", fetch)


@_planted("a lineage reads the stream while its leader still has the older one's consumer")
def _(patch: pytest.MonkeyPatch) -> None:
    async def wait_alone(bus: Any, stream: str) -> None:
        pass

    patch.setattr("areal_async.bus.streams._wait_alone", wait_alone)


@_planted("images are removed without asking whether a newer trainer has begun")
def _(patch: pytest.MonkeyPatch) -> None:
    right = ModelImages.purge

    async def is_newest() -> bool:
        return True

    async def purge(self: ModelImages, group_ids: Iterable[str], **_: Any) -> None:
        await right(self, group_ids, is_newest=is_newest)

    patch.setattr(ModelImages, "purge", purge)


@_planted("a sweep takes the images of groups that the trainer has not heard of")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchPlanner, "is_over", lambda self, group_id: group_id not in self.open)


@_planted("a group is over once it is in a cut")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchPlanner, "is_over", lambda self, group_id: self.is_closed(group_id))


@_planted("a node stores a slot before what it shows")
def _(patch: pytest.MonkeyPatch) -> None:
    right, put = NodeModel._store, ModelImages.store

    async def store(self: NodeModel, ticket: Ticket, slots: list[Slot], producer: str) -> None:
        await right(self, ticket, slots, producer)
        await put(self.process.bus.images, ticket.group_id)

    async def nothing(self: ModelImages, group_id: str) -> None:
        pass

    patch.setattr(NodeModel, "_store", store)
    patch.setattr(ModelImages, "store", nothing)


@_planted("going back leaves what was cut since in the journal")
def _(patch: pytest.MonkeyPatch) -> None:
    async def write_branch(self: Lineage, journal: Journal) -> int:
        return self._last_cut_sequence

    patch.setattr(Lineage, "write_branch", write_branch)


@_planted("an order to go back is over before what was cut since is given up")
def _(patch: pytest.MonkeyPatch) -> None:
    right, end = Lineage.write_branch, Lineage.end_rollback

    async def write_branch(self: Lineage, journal: Journal) -> int:
        assert self.rollback is not None
        await end(self, self.rollback)
        return await right(self, journal)

    async def nothing(self: Lineage, order: Rollback, *, refusal: str = "") -> None:
        pass

    patch.setattr(Lineage, "write_branch", write_branch)
    patch.setattr(Lineage, "end_rollback", nothing)


@_planted("the run goes back to what it has gone back behind before")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("areal_async.protocol.journal.last_shared_step", lambda version, **_: version.step)


@_planted("what was recorded trained stays so where the run goes back")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Journal.without_end

    def without_end(self: Journal) -> list[CutGroup]:
        return [group for group in right(self) if group.group_id not in self.settled]

    patch.setattr(Journal, "without_end", without_end)


@_planted("the credit of a group that is rolled back does not return")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Accounts.add_outcome

    def add_outcome(self: Accounts, outcome: Outcome) -> None:
        before = self._num_settled_untrained
        right(self, outcome)
        if outcome.kind is OutcomeKind.ROLLED_BACK:
            self._num_settled_untrained = before

    patch.setattr(Accounts, "add_outcome", add_outcome)


@_planted("being rolled back counts as a failed attempt")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Accounts._readmit

    def readmit(self: Accounts, group_id: str, *, num_failed_attempts: int) -> None:
        num_failed_attempts += self.journal.end_of(group_id) is OutcomeKind.ROLLED_BACK
        right(self, group_id, num_failed_attempts=num_failed_attempts)

    patch.setattr(Accounts, "_readmit", readmit)


def _have_followers_asked(patch: pytest.MonkeyPatch) -> None:
    """Have reads answered by anybody, who may know less than was seen already."""
    patch.setattr(ModelBus, "least_known", lambda self, what: 0)


@_planted("groups are held back for as long as the predictions say so, whoever waits")
def _(patch: pytest.MonkeyPatch) -> None:
    def num_wanted(self: Pacer, accounts: Accounts, *, now: float) -> int:
        return min(accounts.num_credits, self._num_short(accounts, now)) if self._can_predict else accounts.num_credits

    patch.setattr(Pacer, "num_wanted", num_wanted)


@_planted("groups are held back before anything was observed")
def _(patch: pytest.MonkeyPatch) -> None:
    right = Pacer.num_wanted

    def num_wanted(self: Pacer, accounts: Accounts, *, now: float) -> int:
        return right(self, accounts, now=now) if self._can_predict else 0

    patch.setattr(Pacer, "num_wanted", num_wanted)
