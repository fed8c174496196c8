"""Room in the stream of images: what groups that are over have looked at is removed, and how full it is, is known.

What is stored is listed each time, so nothing is counted: images that were put for a group after its end, or that a
trainer left which died, go as all others do.
"""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.bus.images import CHUNK_BYTES
from areal_async.config.settings import MESSAGE_OVERHEAD_BYTES
from areal_async.process.bell import Bell
from areal_async.trainer.batch.cut import StreamRoom

POLL_S = 1.0

log = structlog.get_logger()


class ImageSweep:
    """Removes the images of groups that are over, and measures what is left."""

    def __init__(self, bus: Bus, *, is_over: Callable[[str], bool], is_newest: Callable[[], Awaitable[bool]]) -> None:
        """``is_over`` says that a group's outcome is stored, and that nothing is held for its ack."""
        self._bus = bus
        self._is_over = is_over
        self._is_newest = is_newest
        self._changed = Bell()
        self._sweeping = anyio.Lock()
        self._is_empty = True

    def notify(self) -> None:
        """Have it look at once: groups are over."""
        self._changed.ring()

    async def run(self, on_room: Callable[[StreamRoom], None]) -> None:
        """Sweep and tell of the room at the begin, each second, and whenever groups are over, until cancelled.

        Where nothing is stored, as in a run without images, groups that are over change nothing: the broker is not
        asked for each.
        """
        while True:
            num_seen = self._changed.num_rings
            on_room(await self.sweep())
            with anyio.move_on_after(POLL_S):
                await (anyio.sleep_forever() if self._is_empty else self._changed.wait(num_seen))

    async def sweep(self) -> StreamRoom:
        """Remove the images of groups that are over; return the room that there is then."""
        async with self._sweeping:
            room, num_messages = await self._measure()
            self._is_empty = not num_messages
            if num_messages:
                gone = await self._bus.images.sweep(lambda one: not self._is_over(one), is_newest=self._is_newest)
                if gone:
                    log.info("images.swept", num_groups=len(gone))
                    room, _ = await self._measure()
            return room

    async def _measure(self) -> tuple[StreamRoom, int]:
        state = await self._bus.stream_state(self._bus.names.images_stream)
        largest = CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES
        return StreamRoom.of(state.num_bytes, largest=largest, limit=state.max_bytes), state.num_messages
