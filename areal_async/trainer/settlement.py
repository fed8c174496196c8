"""What becomes of groups: outcomes stored, and only then the messages they speak of acked.

A trained group's messages stay un-acked until ``on_checkpoint``; every other end is recorded and acked at once.
A group is recorded once per lineage, whatever is asked for it.
"""

from collections.abc import Iterable

import anyio
import structlog

from areal_async.bus import Bus, Delivery
from areal_async.trainer.inventory import Inventory
from areal_async.types import Cut, Outcome, OutcomeKind

log = structlog.get_logger()


class Settlement:
    """Records outcomes of one lineage and acks what they settle."""

    def __init__(
        self, bus: Bus, inventory: Inventory[Delivery], *, lineage: int, max_attempts: int, recorded: Iterable[str]
    ) -> None:
        """``recorded``: groups that have an outcome already."""
        self._bus = bus
        self._inventory = inventory
        self._lineage = lineage
        self._max_attempts = max_attempts
        self._recorded = set(recorded)
        self._num_failed_attempts: dict[str, int] = {}
        """Of groups in cuts that no checkpoint holds, should they fall out."""
        self._num_whole = 0
        self._num_stale = 0
        self._num_failed = 0
        self.unacked_cuts: dict[int, Cut] = {}
        """Cuts that no checkpoint holds yet."""

    def hold(self, cut: Cut) -> None:
        """Take a journalled cut: its groups wait for the checkpoint that will contain them."""
        self.unacked_cuts[cut.step] = cut
        self._inventory.close_cut(cut.groups)
        self._num_failed_attempts.update({group.group_id: group.num_failed_attempts for group in cut.groups})

    def count_whole(self) -> None:
        """Note a group with enough scored slots: failures before and after it do not follow one another."""
        self._num_whole += 1

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped as stale, and how many failed, since the last call."""
        counts = self._num_stale, self._num_failed
        self._num_stale = self._num_failed = 0
        return counts

    async def on_checkpoint(self, step: int) -> None:
        """Record and ack what the checkpoint of ``step`` contains. It must be on disk, and the newest by the bucket.

        Groups that fell out of their cut have an outcome already, which stays.
        """
        done = [cut for number, cut in sorted(self.unacked_cuts.items()) if number <= step]
        await self._record(
            Outcome(group_id=group.group_id, kind=OutcomeKind.TRAINED, lineage=self._lineage, step=cut.step)
            for cut in done
            for group in cut.groups
        )
        await self._ack(group.group_id for cut in done for group in cut.groups)
        for cut in done:
            del self.unacked_cuts[cut.step]
            for group in cut.groups:
                self._num_failed_attempts.pop(group.group_id, None)

    async def settle(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> None:
        """End groups without training them: record, then ack."""
        ids = list(group_ids)
        outcomes = [self._untrained(group_id, kind, reason=reason, step=step) for group_id in ids]
        self._inventory.close(ids)
        await self._record(outcomes)
        await self._ack(ids)
        self._num_stale += sum(outcome.kind is OutcomeKind.STALE for outcome in outcomes)
        self._num_failed += sum(_has_failed(outcome) for outcome in outcomes)

    async def note_slot(self, outcome: Outcome) -> None:
        """Record what became of a single slot; it settles nothing."""
        await self._publish(outcome)

    async def ack_if_recorded(self, group_id: str) -> None:
        """Ack what has come for a group whose fate is recorded."""
        if group_id in self._recorded:
            await self._ack([group_id])

    def _untrained(self, group_id: str, kind: OutcomeKind, *, reason: str, step: int) -> Outcome:
        group = self._inventory.open.get(group_id)
        num_failed = group.num_failed_attempts if group else self._num_failed_attempts.get(group_id, 0)
        if kind is OutcomeKind.FAILED:
            num_failed += 1
            if num_failed >= self._max_attempts:
                kind = OutcomeKind.DEAD
        return Outcome(
            group_id=group_id,
            kind=kind,
            lineage=self._lineage,
            step=step,
            reason=reason,
            num_failed_attempts=num_failed,
            num_whole_before=self._num_whole,
        )

    async def _record(self, outcomes: Iterable[Outcome]) -> None:
        """Store outcomes; only then do their groups count as recorded, and may be acked."""
        new = [outcome for outcome in outcomes if outcome.group_id not in self._recorded]
        async with anyio.create_task_group() as publishing:
            for outcome in new:
                publishing.start_soon(self._publish, outcome)
        self._recorded.update(outcome.group_id for outcome in new)
        if any(_has_failed(outcome) for outcome in new):
            self._num_whole = 0

    async def _publish(self, outcome: Outcome) -> None:
        names = self._bus.names
        if outcome.kind is OutcomeKind.DEAD:
            await self._bus.publish(names.dead("group"), outcome, msg_id=f"dead.{outcome.group_id}")
        uid = outcome.sample_uid or outcome.group_id
        await self._bus.publish(names.outcomes, outcome, msg_id=f"{self._lineage}.{uid}.{outcome.kind}")

    async def _ack(self, group_ids: Iterable[str]) -> None:
        deliveries = self._inventory.release(group_ids)
        if deliveries:
            unconfirmed = await self._bus.settle(deliveries)
            if unconfirmed:
                log.info("acks.unconfirmed", num_messages=len(unconfirmed))


def _has_failed(outcome: Outcome) -> bool:
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD)
