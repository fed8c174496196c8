"""Pulling from a consumer, and settling what it delivered.

A pull never leaves more outstanding at the broker than the caller asked for, because what arrives while
nobody looks is a lease that nobody renews. What arrives late all the same (after a cancelled ``fetch``)
is kept for the next one, and given back when the inbox is closed.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio
import msgspec
import structlog

from areal_async.bus.api import TRY_DEADLINE_S, JetStreamApi, MissingError
from areal_async.bus.connection import MOST_TIMES, NO_RESPONDERS, Connection, ConnectionLostError, Received
from areal_async.errors import ConsumerGoneError
from areal_async.process.bell import Bell

PULL_S = 10.0
"""A waiting pull lives this long, beside many nodes up to ``MOST_PULL_S``; the broker remembers who asked for longer.

One that a restarted broker has forgotten is asked again on reconnecting.
"""
MOST_PULL_S = PULL_S * MOST_TIMES
_REMEDY = "make the broker's accounts anew, python -m areal_async.bus, if it is not this run's own"
GRACE_S = 0.5
"""Time after a pull's end within which its last answer may come."""
SETTLE_CHUNK = 128
"""Acks that one confirmation covers."""
SINGLE_DEADLINE_S = 2.0
MAX_SINGLES = 1024
"""Acks asked for one by one, at once, after a chunk could not be confirmed."""
BUSY_PAUSE_S = 0.05
"""Pause after a pull that was refused."""

RECORD_BYTES = 34
"""Size that the broker adds to subject, headers and payload of a message that has headers."""
HEADER_FRAME_BYTES = len("NATS/1.0\r\n" + "\r\n")
HEADER_LINE_BYTES = len(": " + "\r\n")
SIZE_HEADER = "Nats-Msg-Size"
"""The header for a payload's size where only headers are delivered."""
MAX_SIZE_DIGITS = 19

log = structlog.get_logger()


class Delivery:
    """A message that is ours until it is settled, or until its ``ack_wait`` is over."""

    def __init__(self, connection: Connection, received: Received, num_losses: int) -> None:
        self._connection = connection
        self.num_losses = num_losses
        """The connection's count of losses when it came."""
        self._reply = received.reply
        tokens = received.reply.split(".")
        self.stream, _, *numbers = tokens[2:] if len(tokens) == 9 else tokens[4:]
        self.subject = received.subject
        self.headers = received.headers
        self.data = received.data
        """The payload; empty where the consumer delivers headers only."""
        self.num_delivered = int(numbers[0])
        """Number of this delivery, from 1; more than 1 where it was delivered before and not settled."""
        self.sequence = int(numbers[1])
        """Its number in the stream: a hint, never a key."""
        self._numbers = numbers

    @property
    def num_pending(self) -> int:
        """How many more the consumer had to deliver when it delivered this one."""
        return int(self._numbers[4])

    @property
    def stored_ns(self) -> int:
        """When it was stored, in nanoseconds since 1970 by the broker's clock."""
        return int(self._numbers[3])

    @property
    def num_bytes(self) -> int:
        """Size of the payload, also where only headers were delivered."""
        told = self.headers.get(SIZE_HEADER, "")  # the broker's, or the sender's own where the broker adds none
        return int(told) if told.isdecimal() and len(told) < MAX_SIZE_DIGITS else len(self.data)

    @property
    def stored_bytes(self) -> int:
        """What it counts for in the ``max_bytes`` of its stream; exact for a message with headers."""
        lines = (len(key) + len(value) + HEADER_LINE_BYTES for key, value in self.headers.items() if key != SIZE_HEADER)
        return RECORD_BYTES + len(self.subject) + HEADER_FRAME_BYTES + sum(lines) + self.num_bytes

    @property
    def is_forwarded(self) -> bool:
        """Whether it is an answer of the broker that was sent here.

        A request may name any subject for its answer, also one on which the asker may not publish: anyone who may read
        what it wrote could so have the broker write it anywhere.
        """
        return "Nats-Sequence" in self.headers

    async def ack(self) -> None:
        """Settle it. Nobody confirms: when the connection breaks now, it comes again."""
        await self._send(b"+ACK")

    async def ack_sync(self, deadline_s: float = TRY_DEADLINE_S) -> bool:
        """Settle it and wait for the broker's word; False when none came, or when the consumer is gone."""
        try:
            answer = await self._connection.request(self._reply, b"+ACK", deadline_s=deadline_s)
        except ConnectionLostError:
            return False
        return answer.status != NO_RESPONDERS

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be delivered again after ``delay_s``."""
        body = f'-NAK {{"delay": {int(delay_s * 1e9)}}}' if delay_s else "-NAK"
        await self._send(body.encode())

    async def term(self) -> None:
        """Never deliver it again."""
        await self._send(b"+TERM")

    async def in_progress(self) -> None:
        """Start its ``ack_wait`` afresh."""
        await self._send(b"+WPI")

    async def _send(self, body: bytes) -> None:
        try:
            await self._connection.publish(self._reply, body)
        except ConnectionLostError:
            log.debug("delivery.settling_lost", subject=self.subject, sequence=self.sequence, body=body.decode())


class Inbox:
    """Deliveries of one consumer, to one process. An async context manager."""

    def __init__(self, api: JetStreamApi, stream: str, consumer: str) -> None:
        self._api = api
        self._consumer = f"{stream}.{consumer}"
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._consumer}"
        self._prefix = api.connection.new_inbox()
        self._num_pulls = 0
        self._arrived: deque[Delivery] = deque()
        self._status: Received | None = None
        self._was_empty = False
        """The last look has found fewer than were asked for."""
        self._is_forgotten = False
        """The broker did not tell of a longer pull's end: by its accounts it forgets before then who asked."""
        self._changed = Bell()
        self._held = AsyncExitStack()

    async def __aenter__(self) -> Self:
        connection = self._api.connection
        await self._api.wait_connected(self._api.retry(f"subscription for {self._consumer}"))
        self._held.push_async_callback(self._give_back)
        await self._held.enter_async_context(connection.listening(f"{self._prefix}.*", self._on_received))
        connection.on_reconnect.append(self._changed.ring)
        self._held.callback(connection.on_reconnect.remove, self._changed.ring)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    async def fetch(self, max_messages: int, *, wait_s: float) -> list[Delivery]:
        """Return what is there, at most ``max_messages``; when nothing is, wait up to ``wait_s`` for the first.

        An empty list is no error: nothing came. Restarts of the broker are waited out within ``wait_s``.

        Raises:
            ConsumerGoneError: the consumer does not exist any more.
            BusError: this role may not pull from it.
        """
        ends_at = anyio.current_time() + wait_s
        while True:
            remaining_s = ends_at - anyio.current_time()
            if self._was_empty and not self._arrived and remaining_s > 0:
                # For one first: each pull has the broker look through all who wait at this consumer, which may be many.
                times = 1.0 if self._is_forgotten else self._api.connection.times
                pull_s = min(PULL_S * times, remaining_s)
                is_connected, num_losses = self._api.connection.is_connected, self._api.connection.num_losses
                await self._pull({"batch": 1, "expires": int(pull_s * 1e9)}, 1, pull_s + GRACE_S)
                if not self._arrived:
                    is_unanswered = is_connected and num_losses == self._api.connection.num_losses and not self._status
                    if is_unanswered and pull_s > PULL_S:
                        self._note_forgotten(pull_s)
                    if anyio.current_time() >= ends_at:
                        return []
                    continue
                if not self._arrived[-1].num_pending:  # most often, where many wait for what comes now and then
                    return self._take(max_messages)
            if (num_wanted := max_messages - len(self._arrived)) > 0:
                await self._pull({"batch": num_wanted, "no_wait": True}, max_messages, GRACE_S)
            self._was_empty = len(self._arrived) < max_messages
            if self._arrived or anyio.current_time() >= ends_at:
                return self._take(max_messages)

    def _note_forgotten(self, pull_s: float) -> None:
        """Go back to short pulls: what such a broker sends to a longer one goes to nobody, and comes again later."""
        self._is_forgotten = True
        log.warning("inbox.pull_forgotten", consumer=self._consumer, pull_s=pull_s, instead_s=PULL_S, remedy=_REMEDY)

    async def _give_back(self) -> None:
        """Give back at once what arrived and was not fetched."""
        with anyio.CancelScope(shield=True):
            for delivery in self._take(len(self._arrived)):
                await delivery.nak()

    def _take(self, max_messages: int) -> list[Delivery]:
        count = min(max_messages, len(self._arrived))
        return [self._arrived.popleft() for _ in range(count)]

    async def _pull(self, request: dict[str, Any], num_wanted: int, deadline_s: float) -> None:
        """Ask once; return when ``num_wanted`` have arrived, the broker ended the pull or the time is over."""
        if len(self._arrived) >= num_wanted:
            return
        connection = self._api.connection
        self._num_pulls += 1
        self._status = None
        with anyio.move_on_after(deadline_s):
            await connection.wait_connected()
            num_losses = connection.num_losses
            try:
                await connection.publish(
                    self._subject, msgspec.json.encode(request), reply=f"{self._prefix}.{self._num_pulls}"
                )
            except ConnectionLostError:
                return
            while len(self._arrived) < num_wanted and self._status is None and connection.num_losses == num_losses:
                await self._changed.wait()
        connection.check_allowed("publish", self._subject)
        await self._check_status()

    async def _check_status(self) -> None:
        if self._status is None or self._status.status in ("404", "408"):  # no message now, none in time
            return
        description = self._status.headers.get("Description", "")
        if self._status.status == NO_RESPONDERS or "Consumer Deleted" in description:
            try:
                await self._api.ask(f"$JS.API.CONSUMER.INFO.{self._consumer}")
            except MissingError as exc:
                raise ConsumerGoneError(f"consumer {self._consumer}: deleted") from exc
        else:
            log.debug("inbox.pull_ended", consumer=self._consumer, description=description)
        if not self._arrived:
            await anyio.sleep(BUSY_PAUSE_S)

    def _on_received(self, received: Received) -> None:
        if received.status is None:
            connection = self._api.connection
            delivery = Delivery(connection, received, connection.num_losses)
            self._api.seen.note(delivery.stream, delivery.sequence)
            self._arrived.append(delivery)
        elif received.subject == f"{self._prefix}.{self._num_pulls}" and received.status != "100":
            self._status = received
        self._changed.ring()


async def settle(connection: Connection, deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Ack many deliveries of one consumer; return those that the broker did not confirm.

    A consumer handles its acks in the order in which they come, and on a WorkQueue stream an ack removes
    (and, under ``sync_interval: always``, syncs) the message before the next is looked at: when the last
    one of a chunk is confirmed over an unbroken connection, the whole chunk is durable. Where that cannot
    be said, each one left is asked for by itself: in a cluster always, as an ack may get lost between its servers, or
    reach a leader that is none any more, and the next one another. What is unconfirmed was forgotten by a restarted
    broker; it is delivered again, and can then be settled by either delivery.
    """
    if connection.is_clustered:
        return await _settle_singly(deliveries)
    for start in range(0, len(deliveries), SETTLE_CHUNK):
        chunk = deliveries[start : start + SETTLE_CHUNK]
        num_losses = connection.num_losses
        for delivery in chunk[:-1]:
            await delivery.ack()
        if not (await chunk[-1].ack_sync() and connection.num_losses == num_losses):
            return await _settle_singly(deliveries[start:])
    return []


async def _settle_singly(deliveries: Sequence[Delivery]) -> list[Delivery]:
    confirmed: set[int] = set()
    limit = anyio.Semaphore(MAX_SINGLES)

    async def ack(delivery: Delivery) -> None:
        async with limit:
            if await delivery.ack_sync(SINGLE_DEADLINE_S):
                confirmed.add(id(delivery))

    async with anyio.create_task_group() as acks:
        for delivery in deliveries:
            acks.start_soon(ack, delivery)
    return [delivery for delivery in deliveries if id(delivery) not in confirmed]
