"""What becomes of groups, carried out: outcomes stored, and only then the messages they speak of acked.

The rules are ``Fates``'. A trained group's messages stay un-acked until ``on_checkpoint``; every other end is
recorded and acked at once.
"""

from collections.abc import Iterable, Sequence

import anyio
import structlog

from areal_async.bus import Bus, Delivery
from areal_async.fault_points import reach
from areal_async.trainer.fates import Fates
from areal_async.types import Outcome, OutcomeKind, StoredMessage

log = structlog.get_logger()


class Settlement:
    """Records outcomes of one lineage and acks what they settle."""

    def __init__(self, bus: Bus, fates: Fates[Delivery]) -> None:
        self._bus = bus
        self._fates = fates

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped as stale, and how many failed, since the last call."""
        return self._fates.take_counts()

    async def on_checkpoint(self, step: int) -> None:
        """Record and ack what the checkpoint of ``step`` contains. It must be on disk, and the newest by the bucket."""
        await self._record(self._fates.of_checkpoint(step))
        reach("trainer.before_acks")
        await self._ack(self._fates.release_cuts(step))
        reach("trainer.after_acks")

    async def settle(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> None:
        """End groups without training them: record, then ack."""
        ids = list(group_ids)
        await self._record(self._fates.of_untrained(ids, kind, reason=reason, step=step))
        await self._ack(self._fates.release(ids))

    async def receive(self, message: StoredMessage, delivery: Delivery) -> None:
        """Take a stored message; record its slots that cannot be used, and ack what needs not be kept."""
        unusable = self._fates.receive(message, delivery)
        for outcome in unusable:
            await self._publish(outcome)
        await self._ack(self._fates.release_received(message, unusable))

    async def _record(self, outcomes: Sequence[Outcome]) -> None:
        async with anyio.create_task_group() as publishing:
            for outcome in outcomes:
                publishing.start_soon(self._publish, outcome)
        self._fates.note_recorded(outcomes)

    async def _publish(self, outcome: Outcome) -> None:
        names = self._bus.names
        if outcome.kind is OutcomeKind.DEAD:
            await self._bus.publish(names.dead_groups, outcome, msg_id=f"dead.{outcome.group_id}")
        uid = outcome.sample_uid or outcome.group_id
        await self._bus.publish(names.outcomes, outcome, msg_id=f"{outcome.lineage}.{uid}.{outcome.kind}")

    async def _ack(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            unconfirmed = await self._bus.settle(deliveries)
            if unconfirmed:
                log.info("acks.unconfirmed", num_messages=len(unconfirmed))
