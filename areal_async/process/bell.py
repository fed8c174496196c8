"""What wakes tasks that wait for news, within one event loop."""

import asyncio


class Bell:
    """Wakes all who wait for its next ring. It counts the rings, so that none falls between a look and a wait."""

    def __init__(self) -> None:
        self.num_rings = 0
        self._rung: asyncio.Event | None = None

    def ring(self) -> None:
        """Wake all who wait."""
        self.num_rings += 1
        if self._rung is not None:
            self._rung.set()
            self._rung = None

    async def wait(self, num_seen: int | None = None) -> None:
        """Wait, without a deadline, for the next ring; for none where it has rung more than ``num_seen`` times."""
        if num_seen is None or self.num_rings == num_seen:
            self._rung = self._rung or asyncio.Event()
            await self._rung.wait()
