"""The model's trainer: one rank without arithmetic, which carries out what the same ``BatchPlanner`` decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_async.algorithms.advantages import AdvantageRule
from areal_async.bus.sweep import settled_prefix
from areal_async.errors import PipelineError
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback, ServerState
from areal_async.protocol.types import (
    CheckpointRecord,
    Cut,
    CutKind,
    Outcome,
    OutcomeKind,
    StoredMessage,
    Version,
    WeightsVersion,
)
from areal_async.trainer.batch.cut import RetryLater, Settle, StreamRoom
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import BatchSlot, slots_of
from areal_async.trainer.batch.planner import BatchPlanner
from areal_async.trainer.batch.step import agree_on_batch
from tests.protocol.broker import NAMES, effect, idle

if TYPE_CHECKING:
    from tests.protocol.oracle import Content
    from tests.protocol.world import Process, World


@dataclass(frozen=True)
class ModelLedger:
    """What a checkpoint says it was trained on."""

    step: int
    trained: dict[int, list[str]]


@dataclass(eq=False)
class TrainerModel:
    """One trainer, from taking its lineage to the last step."""

    world: World
    process: Process
    step: int = 0
    checkpointed_step: int = 0
    content: Content = ()
    trained: dict[int, list[str]] = field(default_factory=dict)
    wants_stop: bool = False
    num_read: int = 0
    planner: BatchPlanner[StoredMessage] | None = None
    caught_up: set[str] = field(default_factory=set)
    held: dict[int, StoredMessage] = field(default_factory=dict)
    """Settled, and still stored as far as it knows."""

    async def run(self) -> None:
        self.bus = self.process.bus
        self.lineage = await Lineage.take(self.bus)  # type: ignore[arg-type]
        self.number = self.bus.lineage = self.lineage.number
        order = self.lineage.rollback
        refusal = "" if order is None else await self._go_back(order)
        journal = await self.lineage.read_log()
        begin = await self.lineage.write_begin()
        if order is not None:
            if not refusal:
                begin = await self.lineage.write_branch(journal)
            await self.lineage.end_rollback(order, refusal=refusal)
        checkpoint = self.lineage.checkpoint
        restored_step = Version.parse(checkpoint.version).step if checkpoint is not None else 0
        self.journal = Journal(own_lineage=self.number, own_step=restored_step)
        for entry in await self.bus.read_log("", ""):
            self._read(entry)
            if entry.sequence == begin:
                break
        self.planner = BatchPlanner(self.world.config.settings, self.journal, lineage=self.number)
        self.planner.is_stopping = self.wants_stop
        self.process.spawn(self._run_journal())
        await self._restore()
        self.process.spawn(self._run_inbox())
        self.process.spawn(self._run_tickets())
        if self.world.config.has_images:
            self.process.spawn(self._run_images())
        await self._run_loop()

    @property
    def rules(self) -> BatchPlanner[StoredMessage]:
        """The planner, which is there once the journal has been read."""
        assert self.planner is not None
        return self.planner

    def stop(self) -> None:
        """SIGTERM: finish the step, checkpoint, leave."""
        self.wants_stop = True
        if self.planner is not None:
            self.planner.is_stopping = True

    # restoring

    async def _go_back(self, order: Rollback) -> str:
        """Make the ordered checkpoint one of this lineage; return why that cannot be."""
        if not self.world.fits(order.version, await self.lineage.read_log(is_whole=True)):
            return "it is of a lineage that was given up"
        await effect()
        path = f"checkpoints/{self.number}-{Version.parse(order.version).step}"
        self.world.disk[path] = self.world.disk[f"checkpoints/{order.version}"]
        version = path.rpartition("/")[2]
        self.world.oracle.on_weights(Version.parse(version), self.world.disk[path][1])
        await self.lineage.record_checkpoint(CheckpointRecord(version=version, path=path))
        return ""

    # Trainer

    async def _restore(self) -> None:
        checkpoint = self.lineage.checkpoint
        if checkpoint is not None and checkpoint.path:
            ledger, self.content = self.world.disk[checkpoint.path]
            self.trained = dict(ledger.trained)
            self.step = self.checkpointed_step = ledger.step
        for step, groups in self.trained.items():
            strangers = self.journal.unknown_to(step, groups)
            if strangers:
                raise PipelineError(f"checkpoint: step {step} trained {strangers}, unknown to the journal")
        await self._on_checkpoint(self.step)

    async def _run_loop(self) -> None:
        is_current = await self._replay()
        if self.step > self.checkpointed_step:
            await self._checkpoint()
        if not is_current:
            return
        await self._publish_weights()
        await self._wait_for_servers()
        await self._train()
        if self.step > self.checkpointed_step:
            await self._checkpoint()
        await self._remove([], has_room=False)
        if self.step >= self.world.config.steps:
            await self._publish_weights(final=True)

    async def _replay(self) -> bool:
        first_step = due_step = self.step + 1
        for step in self.journal.steps_to_replay():
            cut = self.journal.cut_to_replay(step)
            slots, missing = await self._fetch(cut)
            if self.wants_stop:
                return False
            if missing:
                await self._give_up_cuts(after_step=self.step)
                break
            await self._run_step(cut, slots, [])
            if self.step == due_step:
                await self._checkpoint()
                due_step += self.step + 1 - first_step
        return True

    async def _train(self) -> None:
        self._allow(self.step + 1)
        self.process.spawn(self._run_planner(self.step + 1))
        while True:
            await self._until(lambda: self._owes_checkpoint() or self._next_cut() is not None or self._has_ended())
            if self._owes_checkpoint():
                await self._checkpoint()
                continue
            cut = self._next_cut()
            if cut is None:
                break
            slots, missing = await self._fetch(cut)
            if self.wants_stop:
                break
            await self._run_step(cut, slots, missing)
            await self._publish_weights()
            if self.step % self.world.config.checkpoint_every == 0:
                await self._checkpoint()
            self._allow(self.step + 1)
        await self._until(self._has_ended)

    def _allow(self, step: int) -> None:
        self.rules.allow(step)
        self.world.touch()

    def _owes_checkpoint(self) -> bool:
        is_asked = self.journal.lineage == self.number and self.step in self.journal.checkpoints
        return is_asked and self.step > self.checkpointed_step

    def _next_cut(self) -> Cut | None:
        cut = self.journal.cuts.get(self.step + 1)
        return cut if cut is not None and cut.lineage == self.number else None

    def _has_ended(self) -> bool:
        return self.journal.is_ended and self.journal.lineage == self.number

    async def _run_step(self, cut: Cut, slots: list[BatchSlot], missing: list[tuple[str, int]]) -> None:
        config = self.world.config
        if config.max_staleness > 0:
            self._allow(cut.step + 1)
        batch = agree_on_batch(slots, missing, AdvantageRule(std="none"), min_size=lambda _: config.min_group_size)
        if batch.unusable:
            await self._settle(batch.unusable, OutcomeKind.FAILED, reason="payloads are gone", step=cut.step)
        await effect()
        used = batch.slots
        self.world.oracle.on_train(self.number, start=self.content, slots=used, step=cut.step)
        self.step = cut.step
        self.content = (*self.content, frozenset(placed.item.slot.sample_uid for placed in used))
        self.trained = {**self.trained, cut.step: sorted({placed.group_id for placed in used})}
        self.world.oracle.on_weights(Version(self.number, self.step), self.content)

    async def _fetch(self, cut: Cut) -> tuple[list[BatchSlot], list[tuple[str, int]]]:
        await effect()
        stored = {slot.sample_uid for message in self.world.broker.trajectories.values() for slot in message.slots}
        slots = slots_of(cut)
        if self.world.config.has_images:
            for group_id in {placed.group_id for placed in slots if placed.item.slot.sample_uid in stored}:
                self.world.oracle.on_shown(self.number, group_id)
        return slots, [placed.key for placed in slots if placed.item.slot.sample_uid not in stored]

    async def _publish_weights(self, *, final: bool = False) -> None:
        version = Version(self.number, self.step)
        self.world.oracle.on_weights(version, self.content)
        await self.lineage.announce(WeightsVersion(version=str(version), path=str(version), final=final))

    async def _wait_for_servers(self) -> None:
        while not self.wants_stop:
            servers = [state for state, _ in (await self.bus.entries("server.", ServerState)).values()]
            held = [server.version for server in servers if not server.fenced]
            if held and all(version == f"{self.number}-{self.step}" for version in held):
                return
            await idle()

    async def _checkpoint(self) -> None:
        await effect()
        path = f"checkpoints/{self.number}-{self.step}"
        self.world.disk[path] = ModelLedger(self.step, self.trained), self.content
        self.checkpointed_step = self.step
        await self.lineage.record_checkpoint(CheckpointRecord(version=f"{self.number}-{self.step}", path=path))
        await self._on_checkpoint(self.step)

    # JournalReader

    def _read(self, entry: object) -> None:
        from tests.protocol.roles import read_entry

        read_entry(entry, self.journal)  # type: ignore[arg-type]
        self.num_read += 1
        self.world.touch()

    async def _run_journal(self) -> None:
        while True:
            if self.bus.has_new(self.num_read):
                for entry in (await self.bus.read_new(self.num_read))[:1]:
                    self._read(entry)
            else:
                await idle()

    # BatchFeed

    async def _run_inbox(self) -> None:
        while True:
            if not self.bus.has_pending(self.number) and "inbox" in self.caught_up:
                await idle()
                continue
            message = await self.bus.fetch(self.number)
            if message is None:
                self.rules.is_caught_up = True
                self.caught_up.add("inbox")
                self.world.touch()
                continue
            unusable = self.rules.receive(message, message)
            for outcome in unusable:
                await self._store_outcome(outcome)
            await self._remove(self.rules.release_received(message, unusable))

    async def _run_tickets(self) -> None:
        last = 0
        while True:
            for lease in await self.bus.read_tickets():
                if lease.sequence > last:
                    last = lease.sequence
                    self.rules.add_ticket(lease.ticket, stored_ns=lease.stored_ns)
                    self.world.touch()
            if "tickets" not in self.caught_up:
                self.caught_up.add("tickets")
                self.world.touch()
            await idle()

    async def _run_images(self) -> None:
        num_seen = -1
        while True:
            if num_seen == self.world.changes or not self.world.broker.images:
                await idle()
            num_seen = self.world.changes
            await self.bus.images.sweep(lambda one: not self.rules.is_over(one), is_newest=self.lineage.is_newest)

    async def _run_planner(self, first_step: int) -> None:
        planner = self.rules
        await self._until(lambda: self.caught_up == {"inbox", "tickets"})
        planner.step = first_step
        while not planner.has_ended:
            if self._room is not StreamRoom.AMPLE:
                await self._remove([], has_room=False)
            match planner.decide(now=self.world.now, room=self._room):
                case Settle(group_ids, kind, reason):
                    await self._settle(group_ids, kind, reason=reason, step=planner.step)
                case Cut() as entry:
                    taken = {one.group_id for one in entry.groups}
                    others = [group for name, group in planner.open.items() if name not in taken]
                    if entry.kind is CutKind.CUT:
                        self.world.oracle.on_cut(entry, others)
                    await self.lineage.write_cut(entry)
                    planner.note_written(entry)
                case RetryLater():
                    await idle()

    async def _give_up_cuts(self, *, after_step: int) -> None:
        await self.lineage.write_cut(self.rules.branch(after_step=after_step))
        for step, groups in self.rules.give_up_cuts(after_step=after_step).items():
            await self._settle(groups, OutcomeKind.ABANDONED, reason="could not be replayed", step=step)

    @property
    def _room(self) -> StreamRoom:
        num_stored = self.rules.messages.num_bytes + len(self.held)
        return StreamRoom.of(num_stored, largest=1, limit=self.world.config.max_messages)

    # outcomes

    async def _on_checkpoint(self, step: int) -> None:
        await self._record(self.rules.of_checkpoint(step))
        await self._remove(self.rules.release_cuts(step))

    async def _settle(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> None:
        ids = list(group_ids)
        await self._record(self.rules.of_untrained(ids, kind, reason=reason, step=step))
        await self._remove(self.rules.release(ids))

    # Sweep, of the bus

    async def _remove(self, messages: Iterable[StoredMessage], *, has_room: bool = True) -> None:
        self.held.update({message.sequence: message for message in messages})
        settled = dict(self.held)
        if not settled:
            return
        is_purged = await self._purge(settled)
        if is_purged and has_room and len(self.held) <= self.world.config.max_held:
            return
        rest = list(self.held.values())
        await self.bus.ack(self.number, rest)
        self._forget(rest)

    async def _purge(self, settled: dict[int, StoredMessage]) -> bool:
        if not await self.lineage.is_newest():
            return False
        newest = settled_prefix(await self.bus.list_stored(), settled)
        older = [message for sequence, message in settled.items() if sequence < newest]
        if older:
            if not await self.bus.purge(newest - 1):
                return False
            await self.bus.ack(self.number, [settled[newest]])
            self._forget([*older, settled[newest]])
        return True

    def _forget(self, messages: Iterable[StoredMessage]) -> None:
        """Let go of these deliveries; one that has come again meanwhile is held on."""
        for message in messages:
            if self.held.get(message.sequence) is message:
                del self.held[message.sequence]

    async def _record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            await self._store_outcome(outcome)
        self.rules.note_recorded(outcomes)

    async def _store_outcome(self, outcome: Outcome) -> None:
        uid = outcome.sample_uid or outcome.group_id
        await self.bus.publish(NAMES.outcomes, outcome, msg_id=f"{outcome.lineage}.{uid}.{outcome.kind}")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await idle()
