"""Reading stored messages: one by one, in order up to now, and in order without end.

Reads are direct gets, which hold no state at the broker: after a restart the next one simply goes on
where the last one ended. New messages are noticed by a bell (the messages themselves pass by on their
subject) and, should the bell be missed, by asking every ``POLL_S``.
"""

from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import anyio
import msgspec

from areal_async.bus.api import TRY_DEADLINE_S, WRONG_LAST_SEQUENCE, ApiError, JetStreamApi, Published
from areal_async.bus.client import FORWARDED
from areal_async.bus.connection import NO_RESPONDERS, Connection, ConnectionLostError, Received
from areal_async.errors import BusError, ConflictError
from areal_async.process.bell import Bell

BATCH_MESSAGES = 512
BATCH_BYTES = 8 << 20
POLL_S = 1.0
FIRST_LOOK_S = 0.005
"""The bell may ring before the message is stored: look again soon, then less and less often."""

_READ_HEADERS = {
    "Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence",
}  # fmt: skip


class Message(NamedTuple):
    """A stored message."""

    stream: str
    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes
    stored_at: str = ""
    """Time of storing by the broker's clock (RFC 3339)."""

    @property
    def is_forwarded(self) -> bool:
        """See ``Delivery.is_forwarded``."""
        return FORWARDED in self.headers


class StreamReader(JetStreamApi):
    """JetStream's requests over one connection, the direct gets of stored messages among them."""

    def __init__(self, connection: Connection, operation_deadline_s: float) -> None:
        super().__init__(connection, operation_deadline_s)
        self._bells: dict[str, Bell] = {}
        """One for each subject, for the life of the bus: it counts the messages that pass by there."""

    async def bell(self, subject: str) -> Bell:
        """Return the bell of a subject; it also rings whenever the connection is back."""
        if subject not in self._bells:
            bell = self._bells[subject] = Bell()
            await self.wait_connected(self.retry(f"subscription to {subject}"))
            await self.connection.listen(subject, lambda _: bell.ring())
            self.connection.on_reconnect.append(bell.ring)
        return self._bells[subject]

    async def get_message(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence, or None when it is not stored any more."""
        return await self._one(stream, f"$JS.API.DIRECT.GET.{stream}", {"seq": sequence})

    async def get_last(self, stream: str, subject: str) -> Message | None:
        """Return the newest message of a subject."""
        return await self._one(stream, f"$JS.API.DIRECT.GET.{stream}.{subject}", {})

    async def read_batch(self, stream: str, subject: str, start_sequence: int) -> list[Message]:
        """Return the next messages of a subject (wildcards allowed) from a sequence on; none at the end."""
        body = {
            "seq": max(1, start_sequence),
            "batch": BATCH_MESSAGES,
            "max_bytes": BATCH_BYTES,
            "next_by_subj": subject,
        }
        return await self._batch(stream, body)

    async def read_last_of_each(self, stream: str, *subjects: str) -> list[Message]:
        """Return the newest message of every subject that matches one of these, by their sequence.

        Of more than a batch holds, one that is replaced between two requests is found again, newer.
        """
        newest: dict[str, Message] = {}
        start_sequence = 1
        while batch := await self._batch(
            stream, {"seq": start_sequence, "batch": BATCH_MESSAGES, "multi_last": subjects}
        ):
            newest |= {message.subject: message for message in batch}
            if len(batch) < BATCH_MESSAGES:
                break
            start_sequence = batch[-1].sequence + 1
        return sorted(newest.values(), key=lambda message: message.sequence)

    async def store_after(
        self,
        last_sequence: int,
        stream: str,
        subject: str,
        data: bytes,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Published:
        """Store a message provided that the newest one of its subject is at ``last_sequence``.

        The broker checks the sequence before the id, so a write that is repeated because its answer was lost conflicts
        with itself: it is then looked for by its id.

        Raises:
            ConflictError: another message came first.
        """
        msg_id = msg_id or uuid4().hex
        headers = {**(headers or {}), "Nats-Expected-Last-Subject-Sequence": str(last_sequence)}
        try:
            return await self.store(subject, data, msg_id=msg_id, headers=headers)
        except ApiError as exc:
            if exc.err_code not in WRONG_LAST_SEQUENCE:
                raise
            for message in await self.read_batch(stream, subject, last_sequence + 1):
                if message.headers.get("Nats-Msg-Id") == msg_id:
                    return Published(message.sequence, is_duplicate=True)
            raise ConflictError(f"{subject}: newer than {last_sequence}: {exc.description}; read it again") from exc

    async def _one(self, stream: str, subject: str, body: Mapping[str, Any]) -> Message | None:
        answer = await self.request(subject, msgspec.json.encode(body) if body else b"")
        if answer.status == "404":
            return None
        if answer.status is not None:
            raise BusError(f"{subject}: {answer.status} {answer.headers.get('Description', '')}")
        return _message(stream, answer)

    async def _batch(self, stream: str, body: Mapping[str, Any]) -> list[Message]:
        retry = self.retry(f"read of {stream}")
        while True:
            await self.wait_connected(retry)
            try:
                with anyio.fail_after(min(TRY_DEADLINE_S, retry.remaining_s)):
                    return await self._try_batch(stream, body)
            except (ConnectionLostError, TimeoutError) as exc:
                retry.last_seen = str(exc) or "no answer"
            await retry.pause()

    async def _try_batch(self, stream: str, body: Mapping[str, Any]) -> list[Message]:
        messages: list[Message] = []
        last_sequence = "0"
        with self.connection.call(f"$JS.API.DIRECT.GET.{stream}") as call:
            await call.send(msgspec.json.encode(body))
            while True:
                answer = await call.receive()
                if answer.status == "404":
                    return []
                if answer.status == NO_RESPONDERS:
                    raise ConnectionLostError("nothing listens there: the stream does not exist")
                if answer.status not in (None, "204"):
                    raise BusError(f"read of {stream}: {answer.status} {answer.headers.get('Description', '')}")
                if answer.headers.get("Nats-Last-Sequence") != last_sequence:
                    raise ConnectionLostError(f"a message after {last_sequence} was lost on its way")
                if answer.status == "204":
                    return messages
                last_sequence = answer.headers["Nats-Sequence"]
                messages.append(_message(stream, answer))


class Attention:
    """One reader's way of waiting for news: the bell, a few quick looks after it, and a slow poll."""

    def __init__(self, api: StreamReader, subject: str, poll_s: float = POLL_S) -> None:
        self._api = api
        self._subject = subject
        self._poll_s = poll_s
        self._bell: Bell | None = None
        self._num_seen = 0
        self._look_s = poll_s

    async def listen(self) -> None:
        """Hear from the first call on: before the first look, so that nothing falls in between."""
        if self._bell is None:
            self._bell = await self._api.bell(self._subject)
            self._num_seen = self._bell.num_rings

    async def wait(self) -> None:
        """Return when it is worth looking again. Waits at most ``poll_s``."""
        assert self._bell is not None
        with anyio.move_on_after(self._look_s):
            await self._bell.wait(self._num_seen)
        if self._bell.num_rings != self._num_seen:
            self._num_seen = self._bell.num_rings
            self._look_s = FIRST_LOOK_S
        else:
            self._look_s = min(self._poll_s, 2 * self._look_s)


class Follow(AsyncIterator[Message]):
    """The messages of a subject from a sequence on: those stored, then each new one. An async iterator, endless.

    It holds nothing that must be closed, and may be left at any time.
    """

    def __init__(self, api: StreamReader, stream: str, subject: str, start_sequence: int) -> None:
        self._api = api
        self._stream = stream
        self._subject = subject
        self._next_sequence = start_sequence
        self._ready: deque[Message] = deque()
        self._attention = Attention(api, subject)

    async def __anext__(self) -> Message:
        while not self._ready:
            await self._attention.listen()
            self._ready.extend(await self._api.read_batch(self._stream, self._subject, self._next_sequence))
            if self._ready:
                self._next_sequence = self._ready[-1].sequence + 1
            else:
                await self._attention.wait()
        return self._ready.popleft()


def _message(stream: str, answer: Received) -> Message:
    headers = {key: value for key, value in answer.headers.items() if key not in _READ_HEADERS}
    return Message(
        stream, int(answer.headers["Nats-Sequence"]), answer.headers["Nats-Subject"], headers, answer.data,
        answer.headers.get("Nats-Time-Stamp", ""),
    )  # fmt: skip
