"""Inference servers as NATS micro services, each with a name of its own: their node speaks for them.

A server answers HTTP and knows nothing of NATS; what it does its node knows, on whose connection all of them are found.
"""

from collections.abc import Callable, Mapping

import anyio

from areal_async.bus import Bus, Report, serving
from areal_async.bus.permissions import SERVER

LOOK_S = 1.0


async def run_server_services(bus: Bus, node_id: str, reports: Callable[[], Mapping[str, Report]]) -> None:
    """Have each server answer as ``areal-server`` while it is there, for ever.

    consumes:     ``reports``, by server id: who is in it is there
    waits for:    the next look
    produces:     answers to anyone who asks
    unblocked by: n/a; nobody waits for them
    """
    spoken_for: dict[str, anyio.CancelScope] = {}

    async def speak_for(server_id: str, until: anyio.CancelScope) -> None:
        with until:
            async with serving(
                bus,
                kind=SERVER,
                instance=server_id,
                description="an inference server",
                report=lambda: {"node_id": node_id, **reports().get(server_id, {})},
            ):
                await anyio.sleep_forever()

    async with anyio.create_task_group() as services:
        while True:
            there = set(reports())
            for gone in spoken_for.keys() - there:
                spoken_for.pop(gone).cancel()
            for new in there - spoken_for.keys():
                spoken_for[new] = anyio.CancelScope()
                services.start_soon(speak_for, new, spoken_for[new])
            await anyio.sleep(LOOK_S)
