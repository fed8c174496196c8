"""One ticket: every sibling of its group is sampled, scored and stored, or stored as what became of it.

Invariant: the ticket is acknowledged only after every slot is stored. A node that gets it again runs only the
slots that are missing, with the sampling that holds then: an operator may have changed it since.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import structlog

from areal_async.bus import Delivery
from areal_async.errors import WireError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.types import StoredMessage, Ticket
from areal_async.protocol.wire import decode_headers
from areal_async.rollout.group import GroupRun
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.slots import missing_siblings
from areal_async.telemetry import spans, wait_graph

RETURN_DEADLINE_S = 1.0
RETURN_DELAY_S = 1.0
"""A ticket given back at once could come straight back to a node that is about to end, and wait out its lease there."""

log = structlog.get_logger()


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


async def run_ticket(node: NodeContext, ticket: Ticket, delivery: Delivery) -> None:
    """Run the siblings that are missing and acknowledge the ticket.

    consumes:     a leased ticket whose group is not settled
    waits for:    the inference servers, then room in the stream
    produces:     a stored slot for every sibling, failures included
    unblocked by: the servers; the stream having room
    When cancelled, what is finished is stored and the ticket given back.
    """
    with (
        wait_graph.doing(wait_graph.group(ticket.group_id), waiter=wait_graph.node(node.node_id)),
        spans.leased(ticket, delivery, node_id=node.node_id),
    ):
        async with returned_unless_done(delivery):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_heartbeats, delivery, node.settings.ticket_heartbeat_s)
                stored = await stored_messages(node, ticket) if delivery.num_delivered > 1 else []
                await GroupRun(node, ticket, missing_siblings(ticket, stored)).run()
                tasks.cancel_scope.cancel()
            failpoint("node.before_ack")
            await delivery.ack()
            failpoint("node.after_ack")


async def stored_messages(node: NodeContext, ticket: Ticket) -> list[StoredMessage]:
    """Return what is stored of a ticket's group."""
    names = node.bus.names
    subject = names.trajectories(ticket.workflow, ticket.group_id)
    stored: list[StoredMessage] = []
    async with node.reading:
        async for message in node.bus.find_messages(names.trajectories_stream, subject):
            try:
                found = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            except WireError:
                continue  # the trainer makes it a dead letter
            stored.append(found)
    log.info("ticket.redelivered", group_id=ticket.group_id, num_stored=sum(len(message.slots) for message in stored))
    return stored
