"""Messages that their reader cannot use: stored once more as dead letters, with the reason, and counted.

Anyone who may store messages may store any number of such: what one process makes of them is bounded, and so is the
stream of letters, which refuses what is new, as the first ones tell most. Beyond, only the count, the events and the
log go on. The reader goes on as if they had never come. Every reader of such a message does the same, so a dead
letter's id is that of the message: within the stream's duplicate window it is stored once.
"""

from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from areal_async.bus.api import JetStreamApi
from areal_async.bus.connection import ConnectionLostError
from areal_async.bus.inbox import Delivery
from areal_async.bus.log import Message
from areal_async.errors import StreamFullError, WireError
from areal_async.protocol import wire
from areal_async.protocol.events import MessageBuried
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import DeadLetter, Record

R = TypeVar("R", bound=Record)

MAX_DATA_BYTES = 64 << 10
MAX_HEADER_CHARACTERS = 4096
MAX_STORED_BYTES = 32 << 20
"""Bytes of letters that hold their message, from one process; later ones say where it was and what is wrong."""
MAX_LETTERS = 10_000
"""Letters from one process; a later message is in the log and in an event alone."""

log = structlog.get_logger()


class DeadLetters:
    """The messages that one process could not use."""

    def __init__(self, api: JetStreamApi, names: Names) -> None:
        self._api = api
        self._names = names
        self.num_letters = 0
        """Messages that could not be used, stored as letters or not; only grows."""
        self._stored_bytes = 0

    async def add(self, message: Message | Delivery, reason: str) -> None:
        """Store a dead letter.

        Raises:
            BusError: it could not be stored, and their stream is not full; the message is still where it was.
        """
        is_whole = self._stored_bytes < MAX_STORED_BYTES
        headers = {_printable(key): _printable(value) for key, value in message.headers.items()} if is_whole else {}
        letter = DeadLetter(
            stream=message.stream,
            subject=message.subject,
            sequence=message.sequence,
            reason=_printable(reason[: wire.MAX_REASON_CHARACTERS]),
            reader=self._api.connection.role.value,
            headers=headers,
            data=message.data[:MAX_DATA_BYTES] if is_whole else b"",
        )
        if self.num_letters < MAX_LETTERS:
            data = wire.encode(letter)
            msg_id = f"undecodable.{message.stream}.{message.sequence}"
            with suppress(StreamFullError):
                await self._api.store(self._names.undecodable, data, msg_id=msg_id)
                self._stored_bytes += len(data)
        self.num_letters += 1
        event = MessageBuried(stream=letter.stream, sequence=letter.sequence, reason=letter.reason)
        with suppress(ConnectionLostError):
            subject = self._names.event(event.kind, letter.reader)
            await self._api.connection.publish(subject, msgspec.json.encode(event))
        log.warning("message.buried", stream=letter.stream, sequence=letter.sequence, reason=letter.reason)


def decode(message: Message | Delivery, kind: type[R]) -> R:
    """Return the record in a message.

    Raises:
        WireError: it holds none, or its sender had the broker write it.
    """
    if message.is_forwarded:
        raise WireError(f"{kind.__name__}: an answer of the broker, sent here by somebody who may not write here")
    return wire.decode(message.data, kind)


def _printable(text: str) -> str:
    """What is no UTF-8 comes out of the client as surrogates, which JSON cannot hold."""
    return text[:MAX_HEADER_CHARACTERS].encode(errors="backslashreplace").decode()
