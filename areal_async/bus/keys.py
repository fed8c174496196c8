"""The run's key-value bucket: its state, changed by compare-and-set.

A bucket is a stream with a subject per key, as every NATS tool knows it. There are two: what nodes write is in one of
its own, whose limits refuse nobody else. A write carries an id of its
own, so that a write whose answer was lost can be recognised as done, and is never taken for another's.

A value that cannot be read becomes a dead letter, and the newest one before it that can stands for it: no
cursor is ever taken back to its beginning by a damaged write. The next compare-and-set replaces it. Where none of
those that are kept can be read, the newest that this process has read or written still stands.
"""

import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio

from areal_async.bus.dead import DeadLetters, decode
from areal_async.bus.log import POLL_S, Attention, Message, StreamReader
from areal_async.errors import ConflictError, WireError
from areal_async.protocol import wire
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import Record

R = TypeVar("R", bound=Record)

HISTORY = 16
"""Values kept per key: far enough back to find a write of one's own that others have since overwritten."""
NODES_HISTORY = 1
"""Values kept of a node's key: one that is there can be written again however full its bucket is, as a value
then takes the place of another."""
WHOLE_S = 10.0
"""Time after which all keys that begin alike are read again, and not only what has changed: at the least."""
WHOLE_KEY_S = WHOLE_S / 32
"""For each of them, where they are many: as many are read in a second whatever their number is."""
MAX_REMEMBERED = 4096
"""Unreadable values of which no second dead letter is stored at the next look."""


MAX_KEY_CHARACTERS = 400
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Keys:
    """The buckets of one run."""

    def __init__(self, api: StreamReader, names: Names) -> None:
        self.api = api
        self.names = names
        self._dead_letters = DeadLetters(api, names)
        self._unreadable: deque[int] = deque(maxlen=MAX_REMEMBERED)
        self._known: dict[str, tuple[int, Record]] = {}
        """The newest value that was read or written here, by subject, and its revision."""
        self._views: dict[str, _View] = {}
        """What is known of the keys that begin so."""

    async def get(self, key: str, kind: type[R]) -> tuple[R | None, int]:
        """Return a key's value and revision: ``(None, 0)`` when it never existed, ``(None, n)`` when deleted.

        Raises:
            WireError: none of the values that are kept can be read.
        """
        message = await self.api.get_last(self._stream(key), self._subject(key))
        if message is None:
            return None, 0
        return await self._value(message, kind), message.sequence

    async def put(self, key: str, record: Record) -> int:
        """Set a key whatever it holds; return its new revision.

        Raises:
            StreamFullError: a node's key is new, and there are as many as may be.
        """
        subject = self._subject(key)
        sequence, _ = await self.api.store(subject, wire.encode(record))
        self.api.seen.note_newest(self._stream(key), subject, sequence)
        self._know(subject, sequence, record)
        return sequence

    async def create(self, key: str, record: Record) -> int:
        """Set a key that does not exist.

        Raises:
            ConflictError: it exists.
        """
        old, revision = await self.get(key, type(record))
        if old is not None:
            raise ConflictError(f"key {key}: exists already, at revision {revision}")
        return await self.compare_and_set(key, record, revision)

    async def compare_and_set(self, key: str, record: Record, revision: int) -> int:
        """Set a key that still has ``revision`` (0: never existed); return the new one.

        Raises:
            ConflictError: another writer was faster.
            StreamFullError: as for ``put``.
        """
        subject = self._subject(key)
        sequence, _ = await self.api.store_after(revision, self._stream(key), subject, wire.encode(record))
        self._know(subject, sequence, record)
        return sequence

    async def delete(self, key: str) -> None:
        """Forget a key; one that does not exist is no error."""
        await self.api.store(self._subject(key), b"", headers={"KV-Operation": "DEL"})

    async def entries(self, prefix: str, kind: type[R]) -> dict[str, tuple[R, int]]:
        """Return value and revision of every key that starts with ``prefix``, which ends in a dot, in one request.

        Those that cannot be read are left out. Asked again, it reads what has changed since, however many keys there
        are; all of them every ``WHOLE_S`` or so and after each loss of the connection, as a purge leaves no trace.
        """
        view = self._views.get(prefix)
        if view is None or view.is_over(self.api.connection.num_losses):
            view = self._views[prefix] = _View(self.api.connection.num_losses)
            changed = list((await self._last(prefix)).values())
        else:
            changed = await self.api.read_batch(self._stream(prefix), self._subject(f"{prefix}>"), view.last + 1)
        for message in changed:
            view.last, key = max(view.last, message.sequence), _key_of(message)
            value = None
            with suppress(WireError):
                value = await self._value(message, kind) if _is_key(key) and not _is_deleted(message) else None
            if value is None:
                view.entries.pop(key, None)
            else:
                view.entries[key] = value, message.sequence
        return dict(view.entries)

    async def entries_of(self, keys: Iterable[str], kind: type[R]) -> dict[str, tuple[R, int]]:
        """Return value and revision of those of these keys that exist and can be read, in one request."""
        found: dict[str, tuple[R, int]] = {}
        for key, last in (await self._last(*keys)).items():
            with suppress(WireError):
                if (value := await self._value(last, kind)) is not None:
                    found[key] = value, last.sequence
        return found

    async def records(self, wanted: Mapping[str, type[Record]]) -> dict[str, Record]:
        """Return the values of several keys, by key; without those that do not exist or cannot be read.

        Args:
            wanted: which kind stands at a key; or, where that ends in a dot, at every key that begins so.
        """
        found: dict[str, Record] = {}
        for key, last in (await self._last(*wanted)).items():
            kind = next(wanted[one] for one in wanted if key == one or (one[-1] == "." and key.startswith(one)))
            with suppress(WireError):
                if (value := await self._value(last, kind)) is not None:
                    found[key] = value
        return found

    async def keys(self, *wanted: str) -> list[str]:
        """Return those of these keys that exist, sorted; of one that ends in a dot, all that begin so."""
        return sorted(await self._last(*wanted))

    def watch_key(self, key: str, kind: type[R], *, poll_s: float = POLL_S) -> "Watch[R]":
        """Return the endless iterator of a key's values: the present one, then each newer one that is seen.

        Values between two looks are skipped, and so is a deletion. It looks whenever the key changes, on
        every reconnect, and every ``poll_s``, more seldom where the connection is slowed down.
        """
        return Watch(self, Attention(self.api, self._subject(key), poll_s), key, kind)

    async def _value(self, message: Message, kind: type[R]) -> R | None:
        """Return the record in a value or, where that is none, in the newest one before it that is."""
        values = [message]
        history = NODES_HISTORY if message.stream == f"KV_{self.names.nodes_bucket}" else HISTORY
        if await self._read(message, kind) is None and not _is_deleted(message) and history > 1:
            kept = await self.api.read_batch(message.stream, message.subject, 1)
            values += [one for one in reversed(kept) if one.sequence < message.sequence]
        for value in values:
            if _is_deleted(value):
                return None
            record = await self._read(value, kind)
            if record is not None:
                self._know(message.subject, value.sequence, record)
                return record
        if len(values) < history:
            return None  # it never had a value
        _, known = self._known.get(message.subject, (0, None))
        if isinstance(known, kind):
            return known
        if history == NODES_HISTORY:
            return None  # one damaged write is no reason to keep its writer from the next
        raise WireError(f"key {message.subject}: got {len(values)} values that cannot be read; put one by hand")

    def _know(self, subject: str, revision: int, record: Record) -> None:
        if revision > self._known.get(subject, (0, None))[0]:
            self._known[subject] = revision, record

    async def _read(self, message: Message, kind: type[R]) -> R | None:
        if _is_deleted(message):
            return None
        try:
            return decode(message, kind)
        except WireError as exc:
            if message.sequence not in self._unreadable:
                await self._dead_letters.add(message, str(exc))
                self._unreadable.append(message.sequence)
            return None

    async def _last(self, *wanted: str) -> dict[str, Message]:
        """Return the newest values of keys, by key, as ``keys`` does; each bucket is asked once."""
        subjects: dict[str, list[str]] = {}
        for key in wanted:
            subjects.setdefault(self._stream(key), []).append(self._subject(f"{key}>" if key.endswith(".") else key))
        found: dict[str, Message] = {}
        for stream, own in subjects.items():
            found |= {_key_of(message): message for message in await self.api.read_last_of_each(stream, *own)}
        return {key: message for key, message in found.items() if _is_key(key) and not _is_deleted(message)}

    def _stream(self, key: str) -> str:
        return f"KV_{self.names.bucket_of(key)}"

    def _subject(self, key: str) -> str:
        return f"$KV.{self.names.bucket_of(key)}.{key}"


class _View:
    """Keys that begin alike, as they were at the last look."""

    def __init__(self, num_losses: int) -> None:
        """``num_losses``: the connection's, before they are read."""
        self.entries: dict[str, tuple[Any, int]] = {}
        self.last = 0
        """Newest revision that was seen."""
        self._num_losses = num_losses
        self._began_at = anyio.current_time()

    def is_over(self, num_losses: int) -> bool:
        """Say whether all of them are to be read again."""
        lasts_s = max(WHOLE_S, WHOLE_KEY_S * len(self.entries))
        return num_losses != self._num_losses or anyio.current_time() > self._began_at + lasts_s


class Watch(AsyncIterator[R], Generic[R]):
    """A key's value, then each newer one that is seen. Values between two looks are skipped, as is a deleted key."""

    def __init__(self, keys: Keys, attention: Attention, key: str, kind: type[R]) -> None:
        self._keys = keys
        self._attention = attention
        self._key = key
        self._kind = kind
        self._revision = 0
        self._is_found = False
        """The last look has found something new: there is no more until the key changes again."""

    async def __anext__(self) -> R:
        while True:
            await self._attention.listen()
            if self._is_found:
                self._is_found = False
                await self._attention.wait()
            record, revision = await self._keys.get(self._key, self._kind)
            if record is not None and revision > self._revision:
                self._revision = revision
                self._attention.note_found()
                self._is_found = True
                return record
            await self._attention.wait()


def _key_of(message: Message) -> str:
    return message.subject.split(".", 2)[2]


def _is_key(text: str) -> bool:
    """Say whether this may be a key. Any other is nobody's, and as if it was not there.

    The broker takes every byte in a subject, and one so long that nobody can write there again.
    """
    return len(text) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(text) is not None


def _is_deleted(message: Message) -> bool:
    return message.headers.get("KV-Operation") in ("DEL", "PURGE") and not message.is_forwarded
