"""The launcher's side of operating a run: it ends the run when an operator says so, and tells how processes fare."""

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from areal_async.bus import Bus
from areal_async.launch.supervisor import CrewChange, Notify
from areal_async.run_state import Control, CrewState
from areal_async.subjects import CONTROL


async def take_back_stop(bus: Bus) -> None:
    """Forget an order to stop: whoever starts the run again wants it to go on. A pause stays."""
    control, revision = await bus.get(CONTROL, Control)
    if control is not None and control.is_stopping:
        await bus.compare_and_set(CONTROL, msgspec.structs.replace(control, is_stopping=False), revision)


async def heed_stop(bus: Bus, *, stop: Callable[[], None], notify: Notify) -> None:
    """Stop the run when it is ordered. Orders are told as events; only a pause from before this start is told here.

    consumes:     the key ``control``
    waits for:    its next change
    produces:     a stop
    unblocked by: cancellation alone
    """
    is_first = True
    async for control in bus.watch_key(CONTROL, Control):
        if control.is_paused and is_first:
            notify(f"still paused by {control.by or 'an operator'}: nothing is admitted before it is resumed")
        is_first = False
        if control.is_stopping:
            stop()


async def tell_changes(bus: Bus, changes: MemoryObjectReceiveStream[CrewChange]) -> None:
    """Put what becomes of each crew under its key.

    consumes:     changes
    waits for:    the next one
    produces:     keys that ``status`` reads
    unblocked by: the end of the changes
    """
    with changes:
        async for change in changes:
            state = CrewState(
                name=change.crew,
                state=change.state,
                reason=change.reason,
                num_starts=change.num_starts,
                at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
            await bus.put(bus.names.crew_key(change.crew), state)
