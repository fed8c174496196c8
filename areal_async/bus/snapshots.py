"""What the log comes to up to an entry of it, kept as a key: a start reads that and the entries that follow.

The log stays whole, and a snapshot decides nothing: it is what reading the log up to there comes to, whoever read it.
So it does no harm that a process which was replaced writes one, and one that is wrong, damaged or of another log costs
no more than the reading of all of it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import structlog

from areal_async.bus.dead import decode
from areal_async.bus.jetstream import Bus
from areal_async.bus.log import Message
from areal_async.errors import ConflictError, DeniedError, WireError
from areal_async.protocol.journal import Journal, JournalState, without_slots
from areal_async.protocol.run_state import Snapshot
from areal_async.protocol.subjects import JOURNAL
from areal_async.protocol.types import Cut

EVERY = 4096
"""Entries of the log between two snapshots."""
MAX_STATE_BYTES = 4 << 20
"""A larger one is not kept: it would not fit a message, and its key keeps some older ones."""

S = TypeVar("S")
T = TypeVar("T", bound=msgspec.Struct)

log = structlog.get_logger()


class Snapshots:
    """The snapshots of one key, of which this process reads the newest and may write the next ones."""

    def __init__(self, bus: Bus, key: str) -> None:
        self._bus = bus
        self._key = key
        self._revision: int | None = None
        self._sequence = 0
        """Of the newest one, as far as is known."""

    async def load(self, decode: Callable[[bytes], Awaitable[S]]) -> tuple[S | None, int]:
        """Return what the newest one holds and the entry up to which it was read; ``(None, 0)`` to read the whole log.

        Args:
            decode: raises ``WireError`` for a state that cannot be used.
        """
        try:
            snapshot, self._revision = await self._bus.get(self._key, Snapshot)
            if snapshot is None:
                return None, 0
            if sha256(snapshot.state).hexdigest() != snapshot.state_sha256:
                raise WireError("its digest is another one")
            entry = await self._bus.get_message(self._bus.names.outcomes_stream, snapshot.sequence)
            if entry is None or digest_of(entry) != snapshot.entry_sha256:
                raise WireError(f"entry {snapshot.sequence} of the log is another one")
            state = await decode(snapshot.state)
        except WireError as exc:
            log.warning("snapshot.refused", key=self._key, reason=str(exc), instead="the whole log is read")
            return None, 0
        self._sequence = snapshot.sequence
        return state, snapshot.sequence

    def is_due(self, sequence: int) -> bool:
        """Say whether the next one is to be written, now that the log is read up to there."""
        return sequence >= self._sequence + EVERY

    async def save(self, entry: Message, state: bytes) -> None:
        """Keep what the log comes to up to an entry, unless another process has kept one since."""
        self._sequence = entry.sequence  # also where it is not kept: not to be tried again at the next entry
        if len(state) > MAX_STATE_BYTES:
            log.warning("snapshot.too_large", key=self._key, num_bytes=len(state))
            return
        snapshot = Snapshot(
            sequence=entry.sequence,
            entry_sha256=digest_of(entry),
            state=state,
            state_sha256=sha256(state).hexdigest(),
        )
        try:
            if self._revision is None:
                _, self._revision = await self._bus.get(self._key, Snapshot)
            self._revision = await self._bus.compare_and_set(self._key, snapshot, self._revision)
        except (ConflictError, WireError):
            self._revision = None
        except DeniedError as exc:
            log.warning("snapshot.denied", key=self._key, reason=str(exc))


def digest_of(entry: Message) -> str:
    """Return the digest of an entry of the log."""
    told = f"{entry.sequence} {entry.subject} {entry.headers.get('Nats-Msg-Id', '')} "
    return sha256(told.encode() + entry.data).hexdigest()


async def entries_after(bus: Bus, sequence: int) -> AsyncIterator[Message]:
    """Iterate over the log's entries after this one, up to now."""
    names = bus.names
    async for message in bus.find_messages(names.outcomes_stream, names.log, start_sequence=sequence + 1):
        yield message


def decode_state(data: bytes, kind: type[T]) -> T:
    """Decode what a snapshot holds.

    Raises:
        WireError: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as exc:
        raise WireError(f"{kind.__name__}: cannot decode {len(data)} bytes: {exc}") from exc


def restored(restore: Callable[..., S], *state: Any, **own: Any) -> S:
    """Return what ``restore`` makes of a state.

    Raises:
        WireError: it is none.
    """
    try:
        return restore(*state, **own)
    except (ValueError, OverflowError) as exc:
        raise WireError(str(exc)) from exc


class JournalSnapshots(Snapshots):
    """The trainer's, of a ``Journal``."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, JOURNAL)

    async def load_journal(
        self, *, own_lineage: int = 0, own_step: int = 0, keeps_slots: bool = True
    ) -> tuple[Journal, int]:
        """Return a journal and the entry up to which it is read: 0 where all is still to be read.

        Args:
            own_lineage, own_step: as of ``Journal``.
            keeps_slots: of its cuts, for who trains.
        """

        async def decode_journal(data: bytes) -> Journal:
            state = decode_state(data, JournalState)
            cuts = [await self._cut(sequence) for sequence in state.cuts.values()]
            if not keeps_slots:
                cuts = [without_slots(cut) for cut in cuts]
            return restored(Journal.of_state, state, cuts, own_lineage=own_lineage, own_step=own_step)

        journal, sequence = await self.load(decode_journal)
        return journal or Journal(own_lineage=own_lineage, own_step=own_step), sequence

    async def offer(self, entry: Message, journal: Journal) -> None:
        """Keep what a journal has come to with this entry, if it is time."""
        if self.is_due(entry.sequence) and (state := journal.state()) is not None:
            await self.save(entry, msgspec.msgpack.encode(state))

    async def _cut(self, sequence: int) -> Cut:
        message = await self._bus.get_message(self._bus.names.outcomes_stream, sequence)
        if message is None:
            raise WireError(f"cut {sequence} is not in the log")
        return decode(message, Cut)
