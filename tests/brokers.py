"""A real broker for tests, killed as they like."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from areal_async.bus import Bus, EmbeddedBroker
from areal_async.settings import Settings

OpenRole = Callable[..., Awaitable[Bus]]
"""``await open_role(Role.NODE)`` or ``await open_role(Role.NODE, "1")``."""


@asynccontextmanager
async def running_broker(settings: Settings) -> AsyncIterator[EmbeddedBroker]:
    """A broker under supervision: what kills it, and it comes back."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        async with anyio.create_task_group() as supervision:
            supervision.start_soon(broker.run)
            yield broker
            supervision.cancel_scope.cancel()
    finally:
        await broker.aclose()


def kill(broker: EmbeddedBroker) -> None:
    """Kill the broker's process as a power-hungry neighbour would."""
    os.kill(broker.pid, signal.SIGKILL)


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = 60.0) -> None:
    """Return when something that another process brings about has come true; ``condition`` may have to ask for it."""
    ends_at = anyio.current_time() + within_s
    while anyio.current_time() < ends_at:
        now = condition()
        if now if isinstance(now, bool) else await now:
            return
        await anyio.sleep(0.005)
    raise AssertionError(f"it did not come true within {within_s:g} s")
