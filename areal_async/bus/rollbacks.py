"""Writing the order to go back to an earlier checkpoint: the key ``rollback``, one compare-and-set."""

from contextlib import suppress

from areal_async.bus.jetstream import Bus
from areal_async.errors import ConflictError
from areal_async.protocol.events import now
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.subjects import ROLLBACK
from areal_async.protocol.types import Version


async def order_rollback(
    bus: Bus, version: Version, *, by: str, reason: str, max_by_alarm: int | None = None
) -> Rollback | None:
    """Have the lineage that begins next go on from a checkpoint; return the order.

    Args:
        max_by_alarm: an alarm orders it, of whose orders a run takes so many, and none beside another: None is returned
            then.
    """
    while True:
        held, revision = await bus.get(ROLLBACK, Rollback)
        before = held or Rollback()
        if max_by_alarm is not None and (before.is_due or before.num_by_alarm >= max_by_alarm):
            return None
        order = Rollback(
            number=before.number + 1,
            version=str(version),
            by=by,
            reason=reason,
            at=now(),
            num_by_alarm=before.num_by_alarm + (max_by_alarm is not None),
        )
        with suppress(ConflictError):  # somebody else was faster: theirs first, then ours
            await bus.compare_and_set(ROLLBACK, order, revision)
            return order
