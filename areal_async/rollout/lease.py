"""A leased ticket: kept while it is worked on, and given back where that ends before its time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

import anyio
from anyio.abc import TaskGroup

from areal_async.bus import Delivery

RETURN_DEADLINE_S = 1.0
RETURN_DELAY_S = 1.0
"""A ticket given back at once could come straight back to a node that is about to end, and wait out its lease there."""


class KeptLease:
    """Keeps a lease while its block runs, in a task group of which the block can have more. An async context manager.

    Most tickets are done before theirs has to be kept at all. So it is a timer that keeps it: to cancel a task that
    sleeps writes the task out first, and leaves the frames of its error to the garbage collector.
    The loop has to be ``anyio.run``'s: in a timer, that alone is where anyio looks for it.
    """

    def __init__(self, delivery: Delivery, interval_s: float) -> None:
        self._delivery = delivery
        self._interval_s = interval_s
        self._tasks = anyio.create_task_group()
        self._timer: asyncio.TimerHandle | None = None
        self._is_telling = False
        self._is_over = False

    async def __aenter__(self) -> TaskGroup:
        await self._tasks.__aenter__()
        self._wind()
        return self._tasks

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_telling:
            self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    def _wind(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._tasks.start_soon, self._tell)

    async def _tell(self) -> None:
        if self._is_over:  # it was begun, and had no turn before the block's end
            return
        self._is_telling = True
        await self._delivery.in_progress()
        self._is_telling = False
        if not self._is_over:
            self._wind()


@asynccontextmanager
async def returned_unless_done(*deliveries: Delivery) -> AsyncIterator[None]:
    """Give tickets back at once when the block is left by cancellation or an error."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            with anyio.move_on_after(RETURN_DEADLINE_S, shield=True):
                for delivery in deliveries:
                    await delivery.nak(RETURN_DELAY_S)
