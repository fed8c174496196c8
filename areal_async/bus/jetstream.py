"""The seam that every role gets: what the run needs from a broker, and no more.

Every operation is retried through restarts of the broker until ``operation_deadline_s``; then, and at
once where the broker refuses, it raises ``BusError``. All of it can be cancelled at any await: a write
that was cancelled may or may not have been carried out, and is repeated safely with the same id.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import msgspec
import structlog

from areal_async.bus.api import Published
from areal_async.bus.broker_config import credentials_for
from areal_async.bus.connection import Connection, ConnectionLostError, Received, connect
from areal_async.bus.dead import decode
from areal_async.bus.images import Images
from areal_async.bus.inbox import Delivery, Inbox, settle
from areal_async.bus.keys import Keys
from areal_async.bus.log import POLL_S, Follow, Message, StreamReader
from areal_async.bus.permissions import Role
from areal_async.bus.sweep import Sweep
from areal_async.config.settings import Settings
from areal_async.errors import StreamFullError, WireError
from areal_async.process.bell import Bell
from areal_async.protocol import wire
from areal_async.protocol.events import Event
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import Record

R = TypeVar("R", bound=Record)

CONNECT_DEADLINE_S = 10.0
EMIT_DEADLINE_S = 1.0
FIRST_FULL_WAIT_S = 0.1
MAX_FULL_WAIT_S = 2.0
MAX_UNREAD = 4096
"""Core messages kept for a slow subscriber; the oldest are dropped beyond."""

log = structlog.get_logger()


class StreamState(NamedTuple):
    """How full a stream is."""

    num_messages: int
    num_bytes: int
    max_bytes: int
    """-1 for no limit."""
    last_sequence: int


class Subscription(AsyncIterator[tuple[str, bytes]]):
    """Core messages as they pass by, as ``(subject, data)``, without end; BusError when the connection is closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unread: deque[tuple[str, bytes]] = deque(maxlen=MAX_UNREAD)
        self._arrived = Bell()

    async def __anext__(self) -> tuple[str, bytes]:
        while not self._unread:
            self._connection.check_open()
            with anyio.move_on_after(POLL_S):
                await self._arrived.wait()
        return self._unread.popleft()

    def on_received(self, received: Received) -> None:
        """Take a message in."""
        self._unread.append((received.subject, received.data))
        self._arrived.ring()


class Bus(Keys):
    """One process's access to one run: its keys, its streams and its core messages. Made by ``open_bus``."""

    def __init__(self, connection: Connection, *, names: Names, operation_deadline_s: float = 60.0) -> None:
        super().__init__(StreamReader(connection, operation_deadline_s), names)
        self.connection = connection
        self.role = connection.role
        self.images = Images(self.api, names)
        self._full_turn = anyio.Lock()

    @property
    def is_clustered(self) -> bool:
        """Whether the broker is a cluster: what is read there decides nothing before a compare-and-set went well."""
        return self.connection.is_clustered

    # streams: writing

    async def publish(
        self,
        subject: str,
        payload: bytes | Record,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        expected_last_subject_sequence: int | None = None,
    ) -> Published:
        """Store a message once, however often it must be sent.

        Args:
            msg_id: What repeats an id within the stream's duplicate window is dropped; ``None`` makes one up.
            expected_last_subject_sequence: Store only if the newest message of this subject of the log is at this
                sequence, 0 if none.

        Raises:
            StreamFullError: at once; nothing was stored.
            ConflictError: the subject has a newer message.
            BusError: refused, or no answer within the deadline: then it may have been stored.
        """
        data = wire.encode(payload) if isinstance(payload, Record) else payload
        if expected_last_subject_sequence is None:
            return await self.api.store(subject, data, msg_id=msg_id, headers=headers)
        return await self.api.store_after(
            expected_last_subject_sequence, self.names.outcomes_stream, subject, data, msg_id=msg_id, headers=headers
        )

    async def publish_patiently(self, subject: str, record: Record, *, msg_id: str) -> Published:
        """Store a message as ``publish`` does, however long its stream is full.

        Of many that wait, one asks; the others take their turns after it.
        """
        with suppress(StreamFullError):
            return await self.publish(subject, record, msg_id=msg_id)
        log.warning("stream.full", subject=subject)
        wait_s = FIRST_FULL_WAIT_S
        async with self._full_turn:
            while True:
                with suppress(StreamFullError):
                    return await self.publish(subject, record, msg_id=msg_id)
                await anyio.sleep(wait_s)
                wait_s = min(MAX_FULL_WAIT_S, 2 * wait_s)

    async def emit(self, subject: str, payload: bytes | Record) -> None:
        """Send a message to those who listen now. Never waits long: without a connection the message is dropped."""
        data = wire.encode(payload) if isinstance(payload, Record) else payload
        with anyio.move_on_after(EMIT_DEADLINE_S):
            try:
                await self.connection.publish(subject, data)
            except ConnectionLostError:
                log.debug("bus.event_dropped", subject=subject)

    async def publish_event(self, event: Event, *, instance: str = "0") -> None:
        """Send an event to those who listen now and to the stream of events. Never waits long."""
        await self.emit(self.names.event(event.kind, self.role, instance), msgspec.json.encode(event))

    # streams: reading

    def consume(self, stream: str, consumer: str) -> Inbox:
        """Return the inbox of a consumer, an async context manager; leaving it gives back what was not fetched."""
        return Inbox(self.api, stream, consumer)

    async def settle(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Ack many deliveries of one WorkQueue consumer, durably and cheaply.

        Returns:
            Those that the broker did not confirm. It has forgotten that it delivered them, and does so again.
        """
        return await settle(self.connection, deliveries)

    def sweep(self, stream: str, *, is_newest: Callable[[], Awaitable[bool]]) -> Sweep:
        """Return what removes settled messages of a lineage's consumer from its WorkQueue stream, many at once.

        Args:
            is_newest: Says whether no newer lineage has begun.
        """
        return Sweep(self.api, stream, is_newest)

    def follow(self, stream: str, subject: str, *, start_sequence: int = 1) -> AsyncIterator[Message]:
        """Return the endless iterator of a subject's messages: those stored, in order, then each new one.

        The subject may hold wildcards. Nothing is lost or repeated over restarts of the broker.
        """
        return Follow(self.api, stream, subject, start_sequence)

    async def read_log(self, stream: str, subject: str, *, start_sequence: int = 1) -> list[Message]:
        """Return a subject's messages up to now, in order."""
        return [message async for message in self.find_messages(stream, subject, start_sequence=start_sequence)]

    async def find_messages(self, stream: str, subject: str, *, start_sequence: int = 1) -> AsyncIterator[Message]:
        """Iterate over a subject's messages up to now, in order, holding a few megabytes of them at a time."""
        while batch := await self.api.read_batch(stream, subject, start_sequence):
            for message in batch:
                yield message
            start_sequence = batch[-1].sequence + 1

    async def get_message(self, stream: str, sequence: int) -> Message | None:
        """Return one stored message, or None when it is not stored any more."""
        return await self.api.get_message(stream, sequence)

    async def get_last(self, stream: str, subject: str) -> Message | None:
        """Return the newest stored message of a subject, or None when it has none."""
        return await self.api.get_last(stream, subject)

    async def decode(self, message: Message | Delivery, kind: type[R]) -> R | None:
        """Return the record in a message; None when it holds none, and a dead letter of it is stored."""
        try:
            return decode(message, kind)
        except WireError as exc:
            await self.dead_letter(message, str(exc))
            return None

    async def dead_letter(self, message: Message | Delivery, reason: str) -> None:
        """Make a dead letter of a message that cannot be used; one that was delivered does not come again."""
        await self._dead_letters.add(message, reason)
        if isinstance(message, Delivery):
            await message.term()

    @property
    def num_dead_letters(self) -> int:
        """Messages that this process could not use. Only grows."""
        return self._dead_letters.num_letters

    async def num_unsettled(self, stream: str, consumer: str) -> int:
        """Return how many messages a consumer has still to deliver, or has delivered and waits for."""
        state = await self.api.ask(f"$JS.API.CONSUMER.INFO.{stream}.{consumer}")
        return int(state["num_pending"]) + int(state["num_ack_pending"])

    async def stream_state(self, stream: str) -> StreamState:
        """Say how full a stream is."""
        answer = await self.api.leader_info(stream)
        state = answer["state"]
        return StreamState(state["messages"], state["bytes"], answer["config"]["max_bytes"], state["last_seq"])

    async def stored_by_subject(self, stream: str, subject: str) -> dict[str, int]:
        """Return how many messages a stream has of each subject that matches this one."""
        answer = await self.api.ask(f"$JS.API.STREAM.INFO.{stream}", {"subjects_filter": subject})
        return {found: int(count) for found, count in (answer["state"].get("subjects") or {}).items()}

    async def purge(self, stream: str, subject: str, *, through: int | None = None) -> None:
        """Remove all messages of a subject, which may hold wildcards, from a stream; up to a sequence, or all."""
        last = {} if through is None else {"seq": through + 1}
        await self.api.ask(f"$JS.API.STREAM.PURGE.{stream}", {"filter": subject, **last})

    # core messages

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[Subscription]:
        """Listen to core messages: ``async with bus.subscribe(s) as messages: async for subject, data in messages``.

        Messages sent after the block is entered arrive, except while the connection is down.

        Raises:
            BusError: this role may not listen there.
        """
        subscription = Subscription(self.connection)
        await self.api.wait_connected(self.api.retry(f"subscription to {subject}"))
        async with self.connection.listening(subject, subscription.on_received):
            await self.api.ask("$JS.API.INFO")  # answered after the broker has seen the subscription, or denied it
            self.connection.check_allowed("subscription", subject)
            yield subscription


@asynccontextmanager
async def open_bus(
    url: str,
    *,
    names: Names,
    role: Role,
    instance: str = "0",
    credentials: Path | None = None,
    ca: Path | None = None,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    operation_deadline_s: float = 60.0,
) -> AsyncIterator[Bus]:
    """Connect a process to its run; at the end send what is written and close, within a few seconds.

    Args:
        instance: Tells processes of one role apart in the broker's tools.
        credentials: The role's key file (``credentials_path``) or an external broker's credentials.
        ca: The authority behind an external broker's certificate (``bus.ca``).

    Raises:
        UserError: the broker cannot be reached, refuses, or is too old.
    """
    connection = await connect(
        url,
        name=f"{names.run}.{role}.{instance}",
        role=role,
        credentials=credentials,
        ca=ca,
        deadline_s=connect_deadline_s,
    )
    async with aclosing(connection):
        yield Bus(connection, names=names, operation_deadline_s=operation_deadline_s)


def open_run_bus(
    settings: Settings,
    run_directory: Path,
    url: str,
    role: Role,
    *,
    instance: str = "0",
    credentials: Path | None = None,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    operation_deadline_s: float | None = None,
) -> AbstractAsyncContextManager[Bus]:
    """Connect a process to its run as ``open_bus`` does, with what the run's settings say.

    Args:
        url: where the run's broker is now.
        credentials: ``None`` takes what the role shows the run's broker.
        operation_deadline_s: ``None`` takes ``bus.operation_deadline_s``.

    Raises:
        UserError: the broker cannot be reached, refuses, or is too old.
    """
    return open_bus(
        url,
        names=settings.names,
        role=role,
        instance=instance,
        credentials=credentials or credentials_for(settings, run_directory, role),
        ca=settings.bus.ca,
        connect_deadline_s=connect_deadline_s,
        operation_deadline_s=operation_deadline_s or settings.bus.operation_deadline_s,
    )
