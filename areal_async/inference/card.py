"""Whose turn it is on the GPUs that a node's servers share with the trainer (``inference.colocate: release``).

The trainer says that it has them (KV ``card``); each server then gives its cache back, or is not started, and its node
says so (``ServerState.card``), for which the trainer waits. When the hold is over, each takes its memory and goes on.

Invariants: a server is said to use a card before it may take memory of it, and to be out of the way only when it takes
none; after the first it looks once more whose turn it is, so that the two never pass each other. A hold that is not
written anew for ``lease_s`` is over: its trainer is gone, and nothing here waits for the next one.
"""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from areal_async.inference.pool import ServerHandle
from areal_async.process.bell import Bell
from areal_async.process.failpoints import failpoint
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.run_state import CardHold
from areal_async.protocol.types import Version
from areal_async.telemetry import wait_graph

LEASE_S = 60.0
"""As long as operations on the bus are retried: a broker that is away for a while ends no hold."""
BEAT_S = 10.0
"""Seconds between two words of the trainer that it still has the cards."""
USED = "used"
"""``ServerState.card`` of a server that takes, or may take, memory."""

log = structlog.get_logger()

Publish = Callable[[ServerHandle], Awaitable[None]]


class SharedCard:
    """The turns of one node's servers."""

    def __init__(self, changed: Bell, clock: PausableClock, *, lease_s: float = LEASE_S) -> None:
        """Begin with a card that servers may use.

        Args:
            changed: rung whenever it is somebody else's turn.
            clock: stopped while it is the trainer's.
        """
        self.hold = ""
        """Version of the step that the trainer has the cards for; empty while servers may use them."""
        self.look: Callable[[], Awaitable[CardHold | None]] | None = None
        """Reads what the trainer says; None where nothing is shared with it."""
        self._changed = changed
        self._clock = clock
        self._lease_s = lease_s
        self._heard: CardHold | None = None
        self._heard_anew = Bell()

    def hear(self, said: CardHold | None) -> None:
        """Take in what the trainer says. What was heard before is no new word of it."""
        if said is not None and said != self._heard:
            self._heard = said
            self._heard_anew.ring()
            self._set(said.version if said.is_held else "")

    async def run_lease(self) -> None:
        """End the hold of a trainer that is gone, for ever.

        consumes:     the trainer's word
        waits for:    the next one, for ``lease_s``
        produces:     a card that servers may use
        unblocked by: cancellation alone
        """
        while True:
            with anyio.move_on_after(self._lease_s if self.hold else None) as lease:
                await self._heard_anew.wait()
            if lease.cancelled_caught and self.hold:
                log.warning("card.lease_ended", hold=self.hold, lease_s=self._lease_s)
                self._set("")

    async def start_using(self, server: ServerHandle, publish: Publish) -> None:
        """Return when ``server``, which takes no memory yet, may take it; does nothing where nothing is shared."""
        if self.look is not None:
            await self._use(server, publish)
            await self.stay_away(server, publish)

    async def stay_away(self, server: ServerHandle, publish: Publish) -> None:
        """Say that ``server`` takes no memory, and return when it may take some again, which is said before."""
        while hold := self.hold:
            server.card = hold
            await publish(server)
            failpoint("node.gave_way")
            step = Version.parse(hold).step
            with wait_graph.on(wait_graph.step(step), "its GPU, which is with", waiter=wait_graph.server(server.id)):
                while self.hold == hold:
                    await self._changed.wait()
            await self._use(server, publish)

    async def _use(self, server: ServerHandle, publish: Publish) -> None:
        server.card = USED
        await publish(server)
        if self.look is not None:
            self.hear(await self.look())

    def _set(self, hold: str) -> None:
        if hold == self.hold:
            return
        log.info("card.taken" if hold else "card.free", hold=hold or self.hold)
        self.hold = hold
        if hold:
            self._clock.stop()
        else:
            self._clock.go()
        self._changed.ring()
