"""The bus: every arrow between processes. The only package that imports a NATS client.

    async with open_bus(url, names=names, role=Role.NODE, credentials=path) as bus:
        await bus.publish(subject, payload, msg_id=unique)
        async with bus.consume(stream, consumer) as inbox:
            for delivery in await inbox.fetch(10, wait_s=2):
                await delivery.ack()

Every operation is retried through restarts of the broker until ``bus.operation_deadline_s``; then, and
when the broker refuses, it raises ``BusError``.
"""

from areal_async.process.lean_imports import without

with without("aiohttp"):  # for websockets, which nobody speaks (``bus.url``): 0.15 s of each start, and 9 MB
    import nats.aio.client  # noqa: F401

from areal_async.bus.broker_config import credentials_for, credentials_path
from areal_async.bus.connection import MOST_TIMES
from areal_async.bus.inbox import Delivery, Inbox
from areal_async.bus.inspection import HeldError, copied_broker
from areal_async.bus.jetstream import Bus, StreamState, open_bus, open_run_bus
from areal_async.bus.log import Message
from areal_async.bus.permissions import Role
from areal_async.bus.rollbacks import order_rollback
from areal_async.bus.server import EmbeddedBroker, mark_moved
from areal_async.bus.service import (
    Report,
    Schema,
    ServiceEndpoint,
    ask_service,
    gather_reports,
    hearing_reports,
    json_object,
    serving,
)
from areal_async.bus.snapshots import JournalSnapshots, Snapshots, decode_state, entries_after, restored
from areal_async.bus.streams import declare, take_trainer_consumer
from areal_async.bus.transfer import MovedStream, move_streams

__all__ = [
    "Bus",
    "Delivery",
    "EmbeddedBroker",
    "ServiceEndpoint",
    "HeldError",
    "Inbox",
    "JournalSnapshots",
    "MOST_TIMES",
    "Message",
    "MovedStream",
    "Report",
    "Role",
    "Schema",
    "Snapshots",
    "StreamState",
    "ask_service",
    "copied_broker",
    "credentials_for",
    "credentials_path",
    "declare",
    "decode_state",
    "entries_after",
    "gather_reports",
    "hearing_reports",
    "json_object",
    "mark_moved",
    "move_streams",
    "order_rollback",
    "open_bus",
    "open_run_bus",
    "restored",
    "serving",
    "take_trainer_consumer",
]
