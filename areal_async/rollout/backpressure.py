"""Storing while the stream of trajectories may be full: a node's groups wait for room, the oldest first."""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from areal_async.errors import StreamFullError
from areal_async.process.bell import Bell
from areal_async.process.failpoints import failpoint
from areal_async.telemetry import wait_graph

FIRST_FULL_WAIT_S = 0.1
MAX_FULL_WAIT_S = 2.0

log = structlog.get_logger()


class Backpressure:
    """The groups that wait for a full stream: counted, told of when that begins and ends, and let in by age.

    Room goes to the group that was admitted first. It is the one that the trainer may be waiting for, and what is
    younger could fill the stream before it for ever.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._changed = Bell()
        self.encoding = anyio.Lock(fast_acquire=True)
        """One message is made at a time, and the loop gets a turn before the next. A batch of groups that end together
        would hold it for as long as all of theirs take, and the broker would have nothing to do meanwhile."""

    @property
    def num_waiting(self) -> int:
        return len(self._numbers)

    async def store(self, publish: Callable[[], Awaitable[object]], *, number: int) -> None:
        """Publish a group's message, as often as it takes; ``number`` is its ticket's."""
        wait_s = FIRST_FULL_WAIT_S
        is_waiting = False
        try:
            while True:
                await self._wait_turn(number)
                try:
                    failpoint("node.before_publish")
                    await publish()
                    failpoint("node.after_publish")
                    return
                except StreamFullError:
                    if not is_waiting:
                        is_waiting = True
                        self._begin(number)
                    with wait_graph.on(wait_graph.TRAINER, "room in the stream, from"):
                        await anyio.sleep(wait_s)
                    wait_s = min(MAX_FULL_WAIT_S, wait_s * 2)
        finally:
            if is_waiting:
                self._end(number)

    def _begin(self, number: int) -> None:
        """The group of the ticket with this number has found no room."""
        self._numbers.append(number)
        if self.num_waiting == 1:
            log.warning("stream.full", detail="finished trajectories wait until the trainer has made room")

    def _end(self, number: int) -> None:
        """It waits no longer."""
        self._numbers.remove(number)
        self._changed.ring()
        if self.num_waiting == 0:
            log.info("stream.has_room")

    async def _wait_turn(self, number: int) -> None:
        """Wait until no older group waits for room."""
        while self._numbers and min(self._numbers) < number:
            await self._changed.wait()
