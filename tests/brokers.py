"""A real broker for tests, killed as they like."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio

from areal_async.bus import Bus, Delivery, EmbeddedBroker, Inbox, Role, open_bus
from areal_async.config.settings import Settings

OpenRole = Callable[..., Awaitable[Bus]]
"""``await open_role(Role.NODE)`` or ``await open_role(Role.NODE, "1")``."""
CONNECT_DEADLINE_S = 60.0
"""A busy machine's broker takes its time to let somebody in."""


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


def as_operator(broker: EmbeddedBroker, settings: Settings) -> AbstractAsyncContextManager[Bus]:
    """Connect as who may do everything."""
    return open_bus(
        broker.url,
        names=settings.names,
        role=Role.OPERATOR,
        credentials=broker.credentials(Role.OPERATOR),
        connect_deadline_s=CONNECT_DEADLINE_S,
    )


def kill(broker: EmbeddedBroker) -> None:
    """Kill the broker's process as a power-hungry neighbour would."""
    os.kill(broker.pid, signal.SIGKILL)


PATIENCE_S = 60.0
"""Longer than anything takes that happens at all, also on a machine that does much else."""


async def freeze(broker: EmbeddedBroker) -> None:
    """Stop the broker's process; on a busy machine its threads run on for a while after the signal was sent."""
    os.kill(broker.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{broker.pid}/task")
    await until(lambda: all(one.read_text().rpartition(") ")[2][0] == "T" for one in threads.glob("*/stat")))


async def fetch_all(inbox: Inbox, count: int) -> list[Delivery]:
    """Return the next ``count`` deliveries; one ``fetch`` returns what has come by then, on a busy machine a part."""
    found: list[Delivery] = []
    with anyio.fail_after(PATIENCE_S):
        while len(found) < count:
            found += await inbox.fetch(count - len(found), wait_s=PATIENCE_S)
    return found


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = PATIENCE_S) -> None:
    """Return when something that another process brings about has come true; ``condition`` may have to ask for it.

    It looks less and less often: who asks the broker 200 times a second holds up what he waits for.
    """
    begun_at = anyio.current_time()
    while (waited_s := anyio.current_time() - begun_at) < within_s:
        now = condition()
        if now if isinstance(now, bool) else await now:
            return
        await anyio.sleep(min(0.005 + waited_s / 20, 0.05))
    raise AssertionError(f"it did not come true within {within_s:g} s")
