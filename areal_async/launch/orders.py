"""The launcher's side of the orders of operators: it ends the run when one says so."""

from collections.abc import Callable

import msgspec

from areal_async.bus import Bus
from areal_async.launch.supervisor import Notify
from areal_async.protocol.run_state import Control
from areal_async.protocol.subjects import CONTROL


async def take_back_stop(bus: Bus) -> None:
    """Forget an order to stop: a new start wants the run to go on. A pause stays."""
    control, revision = await bus.get(CONTROL, Control)
    if control is not None and control.is_stopping:
        await bus.compare_and_set(CONTROL, msgspec.structs.replace(control, is_stopping=False), revision)


async def run_stop_orders(bus: Bus, *, stop: Callable[[], None], notify: Notify) -> None:
    """Stop the run when it is ordered. Orders are told as events; only a pause from before this start is told here.

    consumes:     the key ``control``
    waits for:    its next change
    produces:     a stop
    unblocked by: cancellation alone
    """
    before, _ = await bus.get(CONTROL, Control)
    if before is not None and before.is_paused:
        notify(f"still paused by {before.by or 'an operator'}: nothing is admitted before it is resumed")
    async for control in bus.watch_key(CONTROL, Control):
        if control.is_stopping:
            stop()
