"""What is left of each order that an operator gives to a live run: a line in its directory and in the log, an event."""

from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from areal_async.bus import Bus
from areal_async.config.change_record import record_change
from areal_async.protocol.events import RunOrdered, SettingChanged

log = structlog.get_logger()


async def note(bus: Bus, run_directory: Path, event: RunOrdered | SettingChanged) -> None:
    """Leave all of that, once the order is carried out."""
    await anyio.to_thread.run_sync(record_change, run_directory, event)
    log.info(event.kind, **msgspec.structs.asdict(event))
    await bus.publish_event(event)
