"""Reading stored messages: one by one, in order up to now, and in order without end.

Reads are direct gets, which hold no state at the broker: after a restart the next one simply goes on
where the last one ended. New messages are noticed by a bell (the messages themselves pass by on their
subject) and, should the bell be missed, by asking every ``POLL_S``.

In a cluster any server with a copy of the stream answers a direct get, of which a follower may hold an earlier state:
the messages up to some sequence, and all that were deleted since. So what it has is believed, as a sequence means one
message for ever, and what it has not is asked of the stream's leader: a subject's newest message, whether there is
another, whether one is gone. An answer that knows less than this process has seen is an old leader's, and is not
taken. One that knows as much may still be: who decides by what was read ends in a compare-and-set.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import uuid4

import anyio
import msgspec

from areal_async.bus.api import WRONG_LAST_SEQUENCE, ApiError, JetStreamApi, Published, Retry
from areal_async.bus.client import FORWARDED
from areal_async.bus.connection import NO_RESPONDERS, Connection, ConnectionLostError, Received
from areal_async.errors import BusError, ConflictError
from areal_async.process.bell import Bell

BATCH_MESSAGES = 512
BATCH_BYTES = 6 << 20
POLL_S = 1.0
OLD_LEADER_S = 12.0
"""After this time at the latest a leader that is cut off from the others knows that it is none."""
NO_MESSAGE = 10037
"""What a leader answers where a message is not."""
FIRST_LOOK_S = 0.005
"""The bell may ring before the message is stored: look again soon, then less and less often."""
LOOK_GROWTH = 4

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
    def stored_ns(self) -> int:
        """The same as ``Delivery.stored_ns``, to a microsecond; 0 where it is not told."""
        return round(datetime.fromisoformat(self.stored_at).timestamp() * 1e6) * 1000 if self.stored_at else 0

    @property
    def is_forwarded(self) -> bool:
        """See ``Delivery.is_forwarded``."""
        return FORWARDED in self.headers


class _StoredMessage(msgspec.Struct):
    """A message as a leader tells it; bytes in base64."""

    seq: int
    time: str
    subject: str = ""
    hdrs: bytes = b""
    data: bytes = b""


class _LeaderAnswer(msgspec.Struct):
    message: _StoredMessage


class StreamReader(JetStreamApi):
    """JetStream's requests over one connection, the reads of stored messages among them."""

    def __init__(self, connection: Connection, operation_deadline_s: float) -> None:
        super().__init__(connection, operation_deadline_s)
        self._waited_for: set[str] = set()
        """Streams whose leader was waited for in vain, as they never had the message that was asked for."""
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
        """Return the message at this sequence, or None when it is not stored any more, or never was."""
        if sequence < 1:  # the broker would take it for a request without one
            return None
        body = {"seq": sequence}
        found = await self._one(stream, f"$JS.API.DIRECT.GET.{stream}", body)
        if found is None and self.connection.is_clustered:
            await self._wait_reached(stream, sequence)
            return await self._ask_leader(stream, body)
        return found

    async def get_last(self, stream: str, subject: str) -> Message | None:
        """Return the newest message of a subject."""
        if not self.connection.is_clustered:
            return await self._one(stream, f"$JS.API.DIRECT.GET.{stream}.{subject}", {})
        retry = self.retry(f"read of {subject}")
        while True:
            found = await self._ask_leader(stream, {"last_by_subj": subject})
            sequence = found.sequence if found is not None else 0
            if found is None or sequence >= self.seen.newest(stream, subject):
                self.seen.note_newest(stream, subject, sequence)
                return found
            retry.last_seen = f"its leader has {sequence}, and {self.seen.newest(stream, subject)} was there"
            await self.leader_info(stream)
            await retry.pause()

    async def read_batch(self, stream: str, subject: str, start_sequence: int) -> list[Message]:
        """Return the next messages of a subject (wildcards allowed) from a sequence on; none at the end."""
        body = {
            "seq": max(1, start_sequence),
            "batch": BATCH_MESSAGES,
            "max_bytes": BATCH_BYTES,
            "next_by_subj": subject,
        }
        batch = await self._batch(stream, body)
        if batch or not self.connection.is_clustered:
            return batch
        next_one = await self._ask_leader(stream, {"seq": body["seq"], "next_by_subj": subject})
        return [] if next_one is None else [next_one]

    async def read_last_of_each(self, stream: str, *subjects: str) -> list[Message]:
        """Return the newest message of every subject that matches one of these, by their sequence.

        Of more than a batch holds, one that is replaced between two requests is found again, newer.
        """
        newest: dict[str, Message] = {}
        start_sequence = 1
        least = await self._last_sequence(stream) if self.connection.is_clustered else 0
        while batch := await self._batch(
            stream, {"seq": start_sequence, "batch": BATCH_MESSAGES, "multi_last": subjects}, least
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
        retry = self.retry(f"message to {subject}")
        while True:
            try:
                stored = await self.store(subject, data, msg_id=msg_id, headers=headers)
                break
            except ApiError as exc:
                if exc.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                newer = await self.read_batch(stream, subject, last_sequence + 1)
                own = [one.sequence for one in newer if one.headers.get("Nats-Msg-Id") == msg_id]
                if own:
                    stored = Published(own[0], is_duplicate=True)
                    break
                if newer or not await self._is_newest(stream, subject, last_sequence):
                    raise ConflictError(
                        f"{subject}: newer than {last_sequence}: {exc.description}; read it again"
                    ) from exc
                retry.last_seen = str(exc)
            await retry.pause()
        self.seen.note_newest(stream, subject, stored.sequence)
        return stored

    async def leader_info(self, stream: str) -> dict[str, Any]:
        """Return what a stream's leader says of it (``STREAM.INFO``).

        Of a leader that knows less of it than this process, which an old one does, another server is asked.

        Raises:
            BusError: none knows more within the operation's deadline: what was there is lost.
        """
        subject = f"$JS.API.STREAM.INFO.{stream}"
        retry = self.retry(f"request to {subject}")
        while True:
            num_losses = self.connection.num_losses
            told = await self.ask(subject)
            last = told["state"]["last_seq"]
            if not self.connection.is_clustered or self.seen.is_reached(stream, told["created"], last):
                return told
            retry.last_seen = f"its leader is at {last}, and {self.seen.last(stream)} was there"
            await self.leave_silent_server(num_losses)
            await retry.pause()

    async def _last_sequence(self, stream: str) -> int:
        return int((await self.leader_info(stream))["state"]["last_seq"])

    async def _wait_reached(self, stream: str, sequence: int) -> None:
        """Wait until a stream's leader knows of a message that somebody has seen; only for as long as an old one leads.

        What was seen may have been another store's, from which the run was moved, or be lost.
        """
        retry = Retry(f"read of {stream}", OLD_LEADER_S)
        while await self._last_sequence(stream) < sequence and stream not in self._waited_for:
            if not retry.remaining_s:
                self._waited_for.add(stream)
                return
            await retry.pause()

    async def _is_newest(self, stream: str, subject: str, sequence: int) -> bool:
        """Say whether a subject's newest message is this one after all: one that a cluster compared with is under way.

        It compares with what it is about to store, our own first try among it, and that may come to nothing.
        """
        if not self.connection.is_clustered:
            return False
        newest = await self.get_last(stream, subject)
        return (newest.sequence if newest is not None else 0) == sequence

    async def _ask_leader(self, stream: str, body: Mapping[str, Any]) -> Message | None:
        """Return a message that the stream's leader has; None where it has none and knows all that was seen here."""
        subject = f"$JS.API.STREAM.MSG.GET.{stream}"
        try:
            answer = await self.ask(subject, body)
        except ApiError as exc:
            if exc.err_code != NO_MESSAGE:
                raise
            await self.leader_info(stream)
            return None
        try:
            told = msgspec.convert(answer, _LeaderAnswer).message
        except msgspec.ValidationError as exc:
            raise BusError(f"{subject}: got {exc}; only JetStream may answer there") from exc
        self.seen.note(stream, told.seq)
        headers = await self.connection.client.parse_headers(told.hdrs)
        return Message(stream, told.seq, told.subject, headers, told.data, told.time)

    async def _one(self, stream: str, subject: str, body: Mapping[str, Any]) -> Message | None:
        answer = await self.request(subject, msgspec.json.encode(body) if body else b"")
        if answer.status == "404":
            return None
        if answer.status is not None:
            raise BusError(f"{subject}: {answer.status} {answer.headers.get('Description', '')}")
        return self._message(stream, answer)

    async def _batch(self, stream: str, body: Mapping[str, Any], least: int = 0) -> list[Message]:
        """Return one answer's messages.

        Args:
            least: a sequence that the stream has reached, where the newest of subjects are asked for: who has not
                got so far is not believed.
        """
        retry = self.retry(f"read of {stream}")
        num_silent = 0
        while True:
            await self.wait_connected(retry)
            num_losses = self.connection.num_losses
            try:
                with anyio.fail_after(min(self.try_s, retry.remaining_s)):
                    return await self._try_batch(stream, body, least)
            except TimeoutError:
                retry.last_seen = "no answer"
                num_silent += 1
                await self.leave_silent_server(num_losses, num_silent)
            except ConnectionLostError as exc:
                retry.last_seen = str(exc)
                num_silent = 0
            self.note_trouble()
            await retry.pause()

    async def _try_batch(self, stream: str, body: Mapping[str, Any], least: int) -> list[Message]:
        messages: list[Message] = []
        last_sequence = "0"
        with self.connection.call(f"$JS.API.DIRECT.GET.{stream}") as call:
            await call.send(msgspec.json.encode(body))
            while True:
                answer = await call.receive()
                if answer.status == "404":
                    if least and await self._has_any(stream, body["multi_last"]):
                        raise ConnectionLostError("a follower knows less than its leader")
                    return []
                if answer.status == NO_RESPONDERS:
                    raise ConnectionLostError("nothing listens there: the stream does not exist")
                if answer.status not in (None, "204"):
                    raise BusError(f"read of {stream}: {answer.status} {answer.headers.get('Description', '')}")
                if answer.headers.get("Nats-Last-Sequence") != last_sequence:
                    raise ConnectionLostError(f"a message after {last_sequence} was lost on its way")
                if answer.status == "204":
                    if least > int(answer.headers.get("Nats-UpTo-Sequence", least)):
                        raise ConnectionLostError("a follower knows less than its leader")
                    return messages
                last_sequence = answer.headers["Nats-Sequence"]
                messages.append(self._message(stream, answer))

    async def _has_any(self, stream: str, subjects: Iterable[str]) -> bool:
        return any([await self._ask_leader(stream, {"last_by_subj": subject}) for subject in subjects])

    def _message(self, stream: str, answer: Received) -> Message:
        headers = {key: value for key, value in answer.headers.items() if key not in _READ_HEADERS}
        sequence = int(answer.headers["Nats-Sequence"])
        self.seen.note(stream, sequence)
        return Message(
            stream, sequence, answer.headers["Nats-Subject"], headers, answer.data,
            answer.headers.get("Nats-Time-Stamp", ""),
        )  # fmt: skip


class Attention:
    """One reader's way of waiting for news: the bell, a few quick looks after it, and a slow poll."""

    def __init__(self, api: StreamReader, subject: str, poll_s: float = POLL_S) -> None:
        self._api = api
        self._subject = subject
        self._base_poll_s = poll_s
        self._bell: Bell | None = None
        self._num_seen = 0
        self._num_open = 0
        """Rings of which what they told of may not be found yet."""
        self._look_s = self._poll_s

    @property
    def _poll_s(self) -> float:
        return self._base_poll_s * self._api.connection.times

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
        if num_new := self._bell.num_rings - self._num_seen:
            self._num_seen, self._num_open = self._bell.num_rings, self._num_open + num_new
            self._look_s = FIRST_LOOK_S
        else:
            self._look_s = min(self._poll_s, LOOK_GROWTH * self._look_s)
            self._num_open *= self._look_s < self._poll_s

    def note_found(self) -> None:
        """Take in that a look has found something new: where one ring has told of it, no other look is due soon."""
        if self._num_open == 1:
            self._look_s, self._num_open = self._poll_s, 0


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
