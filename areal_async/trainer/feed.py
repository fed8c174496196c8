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
import msgspec
import structlog

from areal_async.bus import Bus, Delivery
from areal_async.errors import WireError
from areal_async.journal import Journal
from areal_async.settings import Settings
from areal_async.staleness import age_at
from areal_async.trainer.cut import CutPlan, plan_cut
from areal_async.trainer.inventory import Inventory
from areal_async.trainer.lineage import Lineage
from areal_async.trainer.settlement import Settlement
from areal_async.types import Cut, CutKind, OutcomeKind, Ticket, Version
from areal_async.wire import decode, decode_headers

INBOX_BATCH = 512
EARLY_CHECKPOINT_SHARE = 0.8
"""Of the stream's bytes: beyond it a checkpoint is made early, so that acks free the stream."""
MAX_NAMED = 3
"""Groups named when saying what is waited for."""

log = structlog.get_logger()


class Feed:
    """Keeps the inventory and cuts batches; ``settlement`` records what becomes of every group."""

    def __init__(self, bus: Bus, settings: Settings, lineage: Lineage, journal: Journal) -> None:
        self._bus = bus
        self._settings = settings
        self._lineage = lineage
        self._branches = dict(journal.branches)
        self._inventory: Inventory[Delivery] = Inventory()
        self._inventory.close(journal.outcomes)
        self.settlement = Settlement(
            bus,
            self._inventory,
            lineage=lineage.number,
            max_attempts=settings.rollout.max_attempts,
            recorded=journal.outcomes,
        )
        self._caught_up = {"inbox": anyio.Event(), "tickets": anyio.Event()}
        self._changed = anyio.Event()
        self._allowed_step = 0
        self._waiting_since: dict[str, float] = {}
        self._is_stopping = False
        self.waits_for = "the first trajectories"

    # what the loop tells it

    def adopt(self, cuts: Iterable[Cut]) -> None:
        """Take over the journalled cuts of older lineages: their groups are not cut again."""
        for cut in cuts:
            self.settlement.hold(cut)

    async def disown(self, *, after_step: int) -> None:
        """Give up the adopted cuts beyond ``after_step``: they cannot be replayed.

        Their groups are abandoned, to be admitted again, and ages count on both sides of that step from now on.
        """
        self._branches[str(self._lineage.number)] = after_step
        await self._lineage.write_cut(
            Cut(kind=CutKind.BRANCH, lineage=self._lineage.number, step=after_step, branches=self._branches)
        )
        unacked_cuts = self.settlement.unacked_cuts
        for step in [step for step in unacked_cuts if step > after_step]:
            groups = [group.group_id for group in unacked_cuts.pop(step).groups]
            reason = f"its cut of step {step} could not be replayed"
            await self.settlement.settle(groups, OutcomeKind.ABANDONED, reason=reason, step=step)

    def allow(self, step: int) -> None:
        """Let the cutter cut up to ``step``."""
        self._allowed_step = max(self._allowed_step, step)
        self._notify()

    def stop(self) -> None:
        """Cut nothing more: the journal's next entry ends the lineage."""
        self._is_stopping = True
        self._notify()

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the stream is so full that acks should not wait for the next regular checkpoint."""
        return self._is_nearly_full and bool(self.settlement.unacked_cuts)

    @property
    def _is_nearly_full(self) -> bool:
        return self._inventory.stored_bytes >= EARLY_CHECKPOINT_SHARE * self._settings.rollout.max_stream_bytes

    @property
    def _is_catching_up(self) -> bool:
        return not self._caught_up["inbox"].is_set()

    @property
    def num_unacked_messages(self) -> int:
        return sum(len(held) for held in self._inventory.deliveries.values())

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
                    self._caught_up["inbox"].set()  # a short read: the backlog is through
                if deliveries:
                    self._notify()

    async def run_tickets(self) -> None:
        """Learn of admitted groups before any of their slots is stored, so that due ones are waited for."""
        names, sequence = self._bus.names, 0
        for message in await self._bus.read_log(names.tickets_stream, names.all_tickets):
            self._inventory.add_ticket(decode(message.data, Ticket))
            sequence = message.sequence
        self._caught_up["tickets"].set()
        async for message in self._bus.follow(names.tickets_stream, names.all_tickets, start_sequence=sequence + 1):
            if self._inventory.add_ticket(decode(message.data, Ticket)):
                self._notify()

    async def run_cutter(self, first_step: int) -> None:
        """Write the journal from ``first_step`` to the last step, or until ``stop``."""
        for reader in self._caught_up.values():
            await reader.wait()  # what was stored before this lineage may be due in its first step
        last_step = self._settings.run.steps
        for step in range(first_step, last_step + 1):
            plan = await self._wait_for_batch(step)
            if plan is None:
                break
            await self._write(step, plan)
        else:
            step = last_step + 1
        await self._lineage.write_cut(Cut(kind=CutKind.END, lineage=self._lineage.number, step=step))
        self.waits_for = "nothing: the last cut is written"

    # inside

    async def _receive(self, delivery: Delivery) -> None:
        try:
            num_bytes = delivery.num_bytes + sum(map(len, delivery.headers.values()))
            message = decode_headers(delivery.headers, sequence=delivery.sequence, num_bytes=num_bytes)
        except WireError as exc:
            log.warning("trajectory.undecodable", subject=delivery.subject, reason=str(exc))
            await self._bus.publish(self._bus.names.dead("undecodable"), str(exc).encode(), msg_id=None)
            await delivery.term()
            return
        unusable = self._inventory.add_message(message, delivery)
        for outcome in unusable:
            await self.settlement.note_slot(msgspec.structs.replace(outcome, lineage=self._lineage.number))
        await self.settlement.ack_if_recorded(message.group_id)

    async def _wait_for_batch(self, step: int) -> CutPlan | None:
        while not self._is_stopping:
            changed = self._changed
            if step > self._allowed_step:
                self.waits_for = f"step {self._allowed_step} to be trained, before cutting step {step}"
                await changed.wait()
                continue
            await self._sweep(step)
            plan = self._plan(step)
            if plan.stale:
                stale = [group.group_id for group in plan.stale]
                await self.settlement.settle(stale, OutcomeKind.STALE, reason="older than max_staleness", step=step)
                continue
            if plan.is_ready or (self._is_nearly_full and plan.taken and not plan.waits_for):
                self._waiting_since.clear()
                return plan
            if self._is_nearly_full and await self._abandon_youngest(step):
                continue
            self.waits_for = _describe(step, plan)
            await self._give_up_overdue(step, plan)
            with anyio.move_on_after(1.0):
                await changed.wait()
        return None

    async def _sweep(self, step: int) -> None:
        """Settle the complete groups that cannot train."""
        for group in list(self._inventory.open.values()):
            if group.is_complete:
                verdict = group.verdict(min_group_size=self._settings.rollout.min_group_size)
                if verdict is not None:
                    kind, reason = verdict
                    await self.settlement.settle([group.group_id], kind, reason=reason, step=step)
                elif not group.is_counted:
                    group.is_counted = True
                    self.settlement.count_whole()

    def _plan(self, step: int) -> CutPlan:
        rollout = self._settings.rollout

        def age(version: Version) -> int:
            branches = {int(lineage): shared for lineage, shared in self._branches.items()}
            return age_at(step=step, version=version, lineage=self._lineage.number, branches=branches)

        return plan_cut(
            self._inventory.open.values(),
            age=age,
            batch_groups=rollout.batch_groups,
            max_staleness=rollout.max_staleness,
            when_stale=rollout.when_stale,
        )

    async def _write(self, step: int, plan: CutPlan) -> None:
        cut = Cut(
            lineage=self._lineage.number,
            step=step,
            groups=[group.as_cut_group() for group in plan.taken],
            seed=(self._settings.run.seed << 32) + step,
            max_staleness=self._settings.rollout.max_staleness,
            masks_stale=self._settings.rollout.when_stale == "mask",
            branches=self._branches,
        )
        await self._lineage.write_cut(cut)
        self.settlement.hold(cut)
        log.info("cut.written", step=step, num_groups=len(cut.groups), num_open=self.num_open_groups)

    async def _abandon_youngest(self, step: int) -> bool:
        """Make room when the stream is nearly full of groups that cannot be cut yet; say whether there was one."""
        if self.settlement.unacked_cuts:
            return False  # the checkpoint of what is being trained will make room
        partial = [group for group in self._inventory.open.values() if group.slots and not group.is_complete]
        if not partial:
            return False
        youngest = max(partial, key=lambda group: group.order)
        reason = "the stream was nearly full, and this was the youngest incomplete group"
        await self.settlement.settle([youngest.group_id], OutcomeKind.ABANDONED, reason=reason, step=step)
        return True

    async def _give_up_overdue(self, step: int, plan: CutPlan) -> None:
        now = time.monotonic()
        waiting = {group.group_id for group in plan.waits_for}
        self._waiting_since = {group_id: self._waiting_since.get(group_id, now) for group_id in waiting}
        deadline_s = self._settings.rollout.group_deadline_s
        overdue = [group_id for group_id, since in self._waiting_since.items() if now - since > deadline_s]
        if overdue:
            reason = f"still incomplete {deadline_s:g} s after the trainer began to wait for it"
            await self.settlement.settle(overdue, OutcomeKind.FAILED, reason=reason, step=step)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _describe(step: int, plan: CutPlan) -> str:
    if plan.waits_for:
        named = ", ".join(group.group_id for group in plan.waits_for[:MAX_NAMED])
        stored = sum(len(group.slots) for group in plan.waits_for)
        wanted = sum(group.group_size for group in plan.waits_for)
        return f"due groups of step {step}: {named} ({len(plan.waits_for)} groups, {stored} of {wanted} slots stored)"
    return f"{plan.num_missing} more complete groups for step {step}"
