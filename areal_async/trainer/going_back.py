"""Going back by itself: the order that an alarm gives. Another trainer carries it out: this one is to be ended."""

from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import structlog

from areal_async.bus import Bus, order_rollback
from areal_async.config.change_record import ordered_rollback, record_change
from areal_async.errors import DeniedError
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Version
from areal_async.trainer.health import Alarm
from areal_async.versions.restore_points import is_restore_point, restore_points

MAX_BY_ALARM = 2
"""In a run: what goes wrong a third time is not mended by trying again."""

log = structlog.get_logger()


async def go_back_before(bus: Bus, run_directory: Path, journal: Callable[[], Journal], alarm: Alarm) -> None:
    """Order that the run goes on from the newest checkpoint before what an alarm shows, unless it did so too often."""
    version = await anyio.to_thread.run_sync(newest_before, run_directory, journal(), alarm.first_version)
    if version is None:
        log.warning("rollback.not_ordered", alarm=alarm.name, reason=f"no checkpoint before step {alarm.first_version}")
        return
    by = f"alarm {alarm.name}"
    try:
        order = await order_rollback(bus, version, by=by, reason=alarm.sentence, max_by_alarm=MAX_BY_ALARM)
        why = f"ordered {MAX_BY_ALARM} times, or just now"
    except DeniedError as exc:  # an external broker whose permissions are older than this
        order, why = None, str(exc)
    if order is None:
        log.warning("rollback.not_ordered", alarm=alarm.name, reason=why)
        return
    event = ordered_rollback(order)
    await anyio.to_thread.run_sync(record_change, run_directory, event)
    log.warning(event.kind, order=event.order, by=by, reason=alarm.sentence)
    await bus.publish_event(event)


def newest_before(run_directory: Path, journal: Journal, step: int) -> Version | None:
    """Return the newest checkpoint of a step before this one that the run may go on from."""
    before = (version for version in restore_points(run_directory, journal) if version.step < step)
    folder = run_directory / "checkpoints"
    newest_first = sorted(before, key=lambda version: (version.step, version.lineage), reverse=True)
    return next((one for one in newest_first if is_restore_point(folder / str(one), journal)), None)
