"""A leased ticket: kept while it is worked on, and given back where that ends before its time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from areal_async.bus import Delivery

RETURN_DEADLINE_S = 1.0
RETURN_DELAY_S = 1.0
"""A ticket given back at once could come straight back to a node that is about to end, and wait out its lease there."""


async def run_heartbeats(delivery: Delivery, interval_s: float) -> None:
    """Keep the lease until cancelled."""
    while True:
        await anyio.sleep(interval_s)
        await delivery.in_progress()


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
