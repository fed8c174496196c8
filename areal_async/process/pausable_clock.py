"""A clock that may stand still, and deadlines by it: what waits for something withheld on purpose is not late."""

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self


class PausableClock:
    """Seconds for which it was not stopped. Of one event loop."""

    def __init__(self) -> None:
        self._stopped_s: float | None = None
        self._lost_s = 0.0
        self._timeouts: set[PausableTimeout] = set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped_s is not None

    def time(self) -> float:
        """Return the time, which has a meaning only beside others of this clock."""
        return (time.monotonic() if self._stopped_s is None else self._stopped_s) - self._lost_s

    def stop(self) -> None:
        """Stand still; nothing that goes by this clock ends by its deadline from now on."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            for timeout in self._timeouts:
                timeout.halt()

    def go(self) -> None:
        """Go on from where it stopped."""
        if self._stopped_s is not None:
            self._lost_s += time.monotonic() - self._stopped_s
            self._stopped_s = None
            for timeout in self._timeouts:
                timeout.go()

    def timeout(self, delay_s: float | None) -> "PausableTimeout":
        """Return an async context manager as ``asyncio.timeout`` does, by this clock; None is no deadline."""
        return PausableTimeout(self, self._timeouts, delay_s)

    async def wait(self, futures: Iterable[asyncio.Future[Any]], delay_s: float) -> None:
        """Wait until all of these are done, or for so long; none of them is cancelled."""
        try:
            async with self.timeout(delay_s) as deadline:
                await asyncio.wait(futures)
        except TimeoutError:
            if not deadline.expired():
                raise


class PausableTimeout:
    """A deadline by a ``PausableClock``."""

    def __init__(self, clock: PausableClock, entered: "set[PausableTimeout]", delay_s: float | None) -> None:
        self._clock = clock
        self._entered = entered
        self._left_s = delay_s
        self._timeout: asyncio.Timeout

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout(None if self._clock.is_stopped else self._left_s)
        await self._timeout.__aenter__()
        self._entered.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.discard(self)
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Say whether the deadline is over, which ends the block with ``TimeoutError``."""
        return self._timeout.expired()

    def renew(self, delay_s: float | None) -> None:
        """Set it anew, to so many seconds from now."""
        self._left_s = delay_s
        if not self._clock.is_stopped:
            self.go()

    def halt(self) -> None:
        """Keep what is left of it, for ``go``."""
        when_s = self._timeout.when()
        if when_s is not None and not self.expired():
            self._left_s = when_s - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def go(self) -> None:
        """Let it come, after what is left of it."""
        if self._left_s is not None and not self.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)
