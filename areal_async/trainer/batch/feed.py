"""Rank 0's side of the bus: what is stored becomes an inventory, and the inventory becomes journalled cuts.

``run_inbox``    consumes trajectory headers; produces open groups; unblocked by nodes that store slots
``run_tickets``  consumes tickets (read, never leased); produces open groups that have no slot yet
``run_cutter``   waits for due groups and for a full batch; produces one journal entry per step; unblocked
                 by the two above, by its own deadlines, and by ``allow`` (no further ahead than staleness admits)

Invariant: a group is in one cut at most, and only in one for whose step all its tokens are fresh enough.
"""

import time
from collections.abc import Iterable

import anyio
import anyio.abc
import structlog

from areal_async.bus import Bus, Delivery, Message
from areal_async.config.live import settings_now, step_numbers
from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Changes
from areal_async.protocol.subjects import CHANGES
from areal_async.protocol.types import Cut, GroupId, OutcomeKind, StoredMessage, Ticket, Version
from areal_async.protocol.wire import decode_headers
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.group_outcomes import GroupOutcomes
from areal_async.trainer.batch.inventory import Inventory
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.outcome_recorder import OutcomeRecorder
from areal_async.trainer.batch.planner import BatchPlanner, CutRules, GroupRules, RetryLater, Settle, StreamRoom, Write

INBOX_BATCH = 512
SCARCE_SHARE = 0.8
"""Of the stream's bytes: beyond it a checkpoint is made early, so that acks free the stream."""
DECISION_POLL_S = 1.0
"""How soon deadlines are looked at when nothing has changed."""

log = structlog.get_logger()


class BatchFeed:
    """Keeps the inventory and carries out what its ``BatchPlanner`` decides; ``settlement`` ends groups."""

    def __init__(self, bus: Bus, settings: Settings, lineage: Lineage, journal: Journal) -> None:
        self._bus = bus
        self._settings = settings
        self.now = settings
        """With what operators have changed."""
        self._lineage = lineage
        self._inventory: Inventory[Delivery] = Inventory()
        self._fates = GroupOutcomes(
            self._inventory,
            lineage=lineage.number,
            max_attempts=settings.rollout.max_attempts,
            recorded=journal.settled,
        )
        self._cutter = BatchPlanner(_rules(settings), self._fates, branches=journal.branches)
        self.settlement = OutcomeRecorder(bus, self._fates, lineage)
        self._limits = TrainingLimits(settings)
        self._without_end = journal.without_end()
        self._fates.take(self._without_end)
        self._caught_up = {"inbox": anyio.Event(), "tickets": anyio.Event()}
        self._changed = anyio.Event()
        self.waits_for = "the first trajectories"

    # what the loop tells it

    def adopt(self, cuts: Iterable[Cut]) -> None:
        """Take over the journalled cuts of older lineages: their groups are not cut again."""
        for cut in cuts:
            self._fates.hold(cut)

    async def disown(self, *, after_step: int, why: str) -> None:
        """Give up the adopted cuts beyond ``after_step``: the first of them cannot be replayed, for this reason.

        Their groups are abandoned, to be admitted again, and ages count on both sides of that step from now on.
        """
        await self._lineage.write_cut(self._cutter.branch(after_step=after_step))
        for step, groups in self._fates.give_up_cuts(after_step=after_step).items():
            what = f"its cut of step {step} could not be replayed"
            reason = f"{what}: {why}" if step == after_step + 1 else f"{what}: that of step {after_step + 1} could not"
            await self.settlement.settle(groups, OutcomeKind.ABANDONED, reason=reason, step=step)

    def allow(self, step: int) -> None:
        """Let the cutter cut up to ``step``."""
        self._cutter.allow(step)
        self._notify()

    def on_room(self) -> None:
        """Look again: what a checkpoint contains has been acked."""
        self._notify()

    def stop(self) -> None:
        """Cut nothing more: the journal's next entry ends the lineage."""
        self._cutter.is_stopping = True
        self._notify()

    @property
    def _room(self) -> StreamRoom:
        rollout, stored_bytes = self._settings.rollout, self._inventory.stored_bytes + self.settlement.num_held_bytes
        if stored_bytes + self._settings.max_message_bytes > rollout.max_stream_bytes:
            return StreamRoom.NONE
        return StreamRoom.SCARCE if stored_bytes >= SCARCE_SHARE * rollout.max_stream_bytes else StreamRoom.AMPLE

    @property
    def _is_catching_up(self) -> bool:
        return not self._caught_up["inbox"].is_set()

    @property
    def num_unacked_messages(self) -> int:
        return sum(len(held) for held in self._inventory.deliveries.values())

    @property
    def num_unacked_bytes(self) -> int:
        return self._inventory.stored_bytes

    @property
    def num_open_groups(self) -> int:
        return len(self._inventory.open)

    # its loops

    async def run_inbox(self) -> None:
        """Read trajectory headers for ever."""
        names = self._bus.names
        async with self._bus.consume(names.trajectories_stream, names.trainer_consumer(self._lineage.number)) as inbox:
            while True:
                deliveries = await inbox.fetch(INBOX_BATCH, wait_s=0.5 if self._is_catching_up else 2.0)
                for delivery in deliveries:
                    await self._receive(delivery)
                if len(deliveries) < INBOX_BATCH:
                    self._inventory.is_caught_up = True
                    self._caught_up["inbox"].set()  # a short read: the backlog is through
                if deliveries:
                    self._notify()

    async def run_changes(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Cut by what operators have changed, for ever; nothing is cut before what they had changed is known."""
        known, _ = await self._bus.get(CHANGES, Changes)
        self._change(known or Changes())
        task_status.started()
        async for changes in self._bus.watch_key(CHANGES, Changes):
            self._change(changes)

    def _change(self, changes: Changes) -> None:
        now = self.now = settings_now(self._settings, changes)
        self._cutter.change(max_staleness=now.rollout.max_staleness, lr=now.trainer.lr, numbers=step_numbers(now))
        self._notify()

    async def run_tickets(self) -> None:
        """Learn of admitted groups before any of their slots is stored, so that due ones are waited for."""
        names, sequence = self._bus.names, 0
        for message in await self._bus.read_log(names.tickets_stream, names.all_tickets):
            await self._add_ticket(message)
            sequence = message.sequence
        self._caught_up["tickets"].set()
        async for message in self._bus.follow(names.tickets_stream, names.all_tickets, start_sequence=sequence + 1):
            if await self._add_ticket(message):
                self._notify()

    async def run_cutter(self, first_step: int) -> None:
        """Write the journal from ``first_step`` to the last step, or until ``stop``."""
        for reader in self._caught_up.values():
            await reader.wait()  # what was stored before this lineage may be due in its first step
        self._cutter.step = first_step
        left = [group.group_id for group in self._without_end]
        await self.settlement.settle(left, OutcomeKind.ABANDONED, reason="its cut was given up", step=first_step)
        with wait_graph.PollingWaits() as waiting:
            while not self._cutter.has_ended:
                changed = self._changed
                if self._room is not StreamRoom.AMPLE:
                    await self.settlement.make_room()
                match self._cutter.decide(now=time.monotonic(), room=self._room):
                    case Settle(group_ids, kind, reason):
                        await self.settlement.settle(group_ids, kind, reason=reason, step=self._cutter.step)
                    case Write(entry):
                        with spans.cut(entry, self._inventory.deliveries):
                            await self._lineage.write_cut(entry)
                        self._cutter.note_written(entry)
                        num_groups, num_open = len(entry.groups), self.num_open_groups
                        log.info(
                            "journal.written",
                            kind=entry.kind,
                            step=entry.step,
                            num_groups=num_groups,
                            num_open=num_open,
                        )
                    case RetryLater(what_for, on):
                        self.waits_for = what_for
                        waiting.replace(wait_graph.cut(self._cutter.step), on or (wait_graph.TRAINER,))
                        with anyio.move_on_after(DECISION_POLL_S):
                            await changed.wait()
        self.waits_for = "nothing: the last cut is written"

    # inside

    async def _add_ticket(self, message: Message) -> bool:
        """Note a ticket; say whether it is news."""
        ticket = await self._bus.decode(message, Ticket)
        if ticket is None:
            return False
        if Version.parse(ticket.version).lineage > self._lineage.number:
            await self._bus.dead_letter(
                message, f"got version {ticket.version}, newer than lineage {self._lineage.number}"
            )
            return False
        return self._inventory.add_ticket(ticket)

    async def _receive(self, delivery: Delivery) -> None:
        try:
            message = decode_headers(delivery.headers, sequence=delivery.sequence, num_bytes=delivery.stored_bytes)
            self._check_origin(message, delivery)
            # Of a group that is cut the journal has the headers, and each payload is checked when it is fetched.
            if not self._fates.is_cut(message.group_id):
                self._limits.check_message(message)
        except WireError as exc:
            await self._give_up_group_of(delivery, str(exc))
            await self._bus.dead_letter(delivery, str(exc))
            return
        await self.settlement.receive(message, delivery)

    def _check_origin(self, message: StoredMessage, delivery: Delivery) -> None:
        """Hold a message against the subject it came on, and against what this lineage can know."""
        if delivery.subject != self._bus.names.trajectories(message.workflow, message.group_id):
            raise WireError(f"got slots of {message.workflow} {message.group_id} on {delivery.subject}")
        versions = [message.ticket_version, *(slot.newest for slot in message.slots)]
        newest = max(map(Version.parse, versions))
        if newest.lineage > self._lineage.number:
            raise WireError(f"got slots of version {newest}, newer than lineage {self._lineage.number}")

    async def _give_up_group_of(self, delivery: Delivery, reason: str) -> None:
        """End the group whose slots cannot be read: its ticket may be gone, so nobody else would."""
        group_id = delivery.subject.rpartition(".")[2]
        try:
            GroupId.parse(group_id)
        except ValueError:
            return
        if group_id not in self._inventory.closed:
            reason = f"its stored message {delivery.sequence} cannot be read: {reason}"
            await self.settlement.settle([group_id], OutcomeKind.FAILED, reason=reason, step=self._cutter.step)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _rules(settings: Settings) -> CutRules:
    rollout = settings.rollout
    return CutRules(
        last_step=settings.run.steps,
        seed=settings.run.seed,
        batch_groups=rollout.batch_groups,
        min_group_size=rollout.min_group_size,
        max_staleness=rollout.max_staleness,
        lr=settings.trainer.lr,
        when_stale=rollout.when_stale,
        group_deadline_s=rollout.group_deadline_s,
        filters_equal_groups=settings.algorithm.filter_equal_groups,
        of_task={
            task.name: GroupRules(own.min_group_size, own.group_deadline_s)
            for task, own in ((task, settings.rollout_of(task.name)) for task in settings.tasks)
        },
    )
