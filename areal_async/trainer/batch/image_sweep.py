"""Room in the stream of images: what groups that are over have looked at is removed, and how full it is, is known.

What is stored is listed, so nothing is counted: images that were put for a group after its end, or that a trainer left
which died, go as all others do. A list takes time for each image, 1 microsecond of the trainer's and up to 7 of its
loop's, so it is asked for where groups are over or room is scarce, and else now and then alone.

What nobody has admitted is kept: the controller may be about to. But anyone who may store an image may store one for a
group that never is, and a controller that died may have left some. So where they take the room that admission waits
for, and no group is left whose end would make some, all that is stored goes.
"""

import math
from collections.abc import Awaitable, Callable

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.bus.images import CHUNK_BYTES
from areal_async.config.settings import MESSAGE_OVERHEAD_BYTES
from areal_async.process.bell import Bell
from areal_async.trainer.batch.cut import StreamRoom

POLL_S = 1.0
LIST_S = 30.0
"""How soon images go that were put for a group after its end, while there is room."""
STRANGERS_S = 60.0
"""How long what nobody has admitted may be in the way: a row's ticket follows its images within a moment."""

log = structlog.get_logger()


class ImageSweep:
    """Removes the images of groups that are over, and measures what is left."""

    def __init__(
        self,
        bus: Bus,
        *,
        is_over: Callable[[str], bool],
        has_nothing: Callable[[], bool],
        is_newest: Callable[[], Awaitable[bool]],
    ) -> None:
        """Take what is known of groups.

        Args:
            is_over: says that a group's outcome is stored, and that nothing is held for its ack.
            has_nothing: says that all groups that are known of are over.
            is_newest: says whether no newer lineage has begun.
        """
        self._bus = bus
        self._is_over = is_over
        self._has_nothing = has_nothing
        self._is_newest = is_newest
        self._changed = Bell()
        self._sweeping = anyio.Lock()
        self._blocked_since: float | None = None
        """Since when strangers alone are in the way."""

    def notify(self) -> None:
        """Have it list what is stored: groups are over."""
        self._changed.ring()

    async def run(self, on_room: Callable[[StreamRoom], None]) -> None:
        """Sweep, and tell of the room at the begin and each second, until cancelled.

        Groups that are over wait for the next second while there is room, and go at once where it is scarce.
        """
        num_seen, listed_at = -1, -math.inf
        while True:
            room, num_messages = await self._measure()
            is_scarce, is_late = room is not StreamRoom.AMPLE, anyio.current_time() - listed_at > LIST_S
            if num_messages and (is_scarce or is_late or self._changed.num_rings != num_seen):
                num_seen, listed_at = self._changed.num_rings, anyio.current_time()
                room = await self.sweep()
            on_room(room)
            with anyio.move_on_after(POLL_S):
                await (anyio.sleep_forever() if room is StreamRoom.AMPLE else self._changed.wait(num_seen))

    async def sweep(self) -> StreamRoom:
        """Remove the images of groups that are over; return the room that there is then."""
        async with self._sweeping:
            gone = await self._bus.images.sweep(lambda one: not self._is_over(one), is_newest=self._is_newest)
            if gone:
                log.info("images.swept", num_groups=len(gone))
            room, _ = await self._measure()
            if self._is_blocked_by_strangers(room):
                await self._bus.images.clear(is_newest=self._is_newest)
                log.warning("images.cleared", reason="images of groups that nobody has admitted took all room")
                room, _ = await self._measure()
            return room

    def _is_blocked_by_strangers(self, room: StreamRoom) -> bool:
        """Say whether for long nothing but images of unknown groups has kept the next from being admitted."""
        if room is StreamRoom.AMPLE:
            return False
        if not self._has_nothing():
            self._blocked_since = None
            return False
        now = anyio.current_time()
        self._blocked_since = now if self._blocked_since is None else self._blocked_since
        return now - self._blocked_since >= STRANGERS_S

    async def _measure(self) -> tuple[StreamRoom, int]:
        state = await self._bus.stream_state(self._bus.names.images_stream)
        largest = CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES
        room = StreamRoom.of(state.num_bytes, largest=largest, limit=state.max_bytes)
        if room is StreamRoom.AMPLE:
            self._blocked_since = None
        return room, state.num_messages
