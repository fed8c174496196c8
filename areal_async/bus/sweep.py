"""Removing settled messages from a WorkQueue stream: its oldest by one purge, however many they are, others by acks.

An ack is a synced delete of one message; a purge is one of as many as there are. But an ack reaches nothing once the
consumer is gone, while a purge asks nobody: it takes what no trainer has received, and what a newer trainer needs.
So the stream is purged up to a sequence only when

- the broker's own list of what it stores holds, up to there, nothing but messages handed in here: what was not received
  or is open ends the prefix, and what is stored later has a higher sequence, so the list cannot become wrong;
- ``is_newest`` says, after they were handed in, that no newer lineage has begun: then it finds their outcomes in the
  log, stored before its begin, and has no use for them either, however late the purge comes;
- all were received, the list was made and the purge is sent over one unbroken connection: a broker that lost the end
  of a stream in a crash may have used a sequence again.

Wherever one of these cannot be said, messages are acked one by one.

A purge that ends where one of the broker's files does is not synced: a power cut brings all of it back (measured).
So it leaves the newest message of those that it could take, and that one is acked: the sync of its delete covers both.
"""

from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Any, NamedTuple

import anyio
import msgspec
import structlog

from areal_async.bus.api import TRY_DEADLINE_S, JetStreamApi, decode_answer
from areal_async.bus.inbox import Delivery, settle
from areal_async.errors import BusError

FEW = 8
"""Number of acks that cost no more than finding out what can be purged."""
MAX_HELD = 1024
"""Settled messages that wait for older ones which are not; beyond it they are acked."""

log = structlog.get_logger()


class StoredSequences(NamedTuple):
    """Which sequences a stream holds: all from the first to the last but the deleted ones."""

    first: int
    last: int
    """``first - 1`` when it holds none."""
    deleted: frozenset[int]


def settled_prefix(stored: StoredSequences, settled: Container[int]) -> int:
    """Return the newest settled message that nothing unsettled is stored before; 0 when the oldest is unsettled."""
    newest = 0
    for sequence in range(stored.first, stored.last + 1):
        if sequence in stored.deleted:
            continue
        if sequence not in settled:
            break
        newest = sequence
    return newest


def must_ack(num_held: int, *, has_room: bool) -> bool:
    """Say whether settled messages behind older ones that are not are acked now, or wait for a later purge.

    One group that stays open for long must not keep everything behind it in the stream.
    """
    return num_held <= FEW or num_held > MAX_HELD or not has_room


class Sweep:
    """The settled messages of one consumer that are still stored."""

    def __init__(self, api: JetStreamApi, stream: str, is_newest: Callable[[], Awaitable[bool]]) -> None:
        self._api = api
        self._stream = stream
        self._is_newest = is_newest
        self._held: dict[int, Delivery] = {}
        self._lock = anyio.Lock()
        self.num_bytes = 0
        """Bytes of them that the stream still holds."""

    @property
    def num_messages(self) -> int:
        """How many of them the stream still holds."""
        return len(self._held)

    async def settle(self, deliveries: Iterable[Delivery]) -> None:
        """Remove messages from the stream, durably; those behind older ones that are not settled perhaps later.

        What the messages say must be recorded: a killed broker may deliver some of them again.
        """
        if new := list(deliveries):  # else what is held back is as far from the stream's first message as before
            self._hold(new)
            await self._sweep(has_room=True)

    async def flush(self) -> None:
        """Remove what is held back as well."""
        await self._sweep(has_room=False)

    async def _sweep(self, *, has_room: bool) -> None:
        if not self._held:
            return
        async with self._lock:
            is_purged = len(self._held) <= FEW or await self._purge()
            held = list(self._held.values())
            if is_purged and not must_ack(len(held), has_room=has_room):
                num_losses = self._api.connection.num_losses
                held = [delivery for delivery in held if delivery.num_losses != num_losses]  # purged they cannot be
            if unconfirmed := await settle(self._api.connection, held):
                log.info("acks.unconfirmed", num_messages=len(unconfirmed))
            self._forget(held)

    async def _purge(self) -> bool:
        """Purge the settled prefix; False where that cannot be done, or cannot be said."""
        connection = self._api.connection
        num_losses = connection.num_losses
        settled = {sequence: one for sequence, one in self._held.items() if one.num_losses == num_losses}
        if not await self._is_newest():
            return False
        try:
            newest = settled_prefix(await self._list(settled), settled)
            older = [delivery for sequence, delivery in settled.items() if sequence < newest]
            if older:
                if connection.num_losses != num_losses:
                    return False
                await self._ask("PURGE", {"seq": newest})
                if not await settled[newest].ack_sync() or connection.num_losses != num_losses:
                    return False
                self._forget([*older, settled[newest]])
        except BusError as exc:
            log.info("purge.unconfirmed", stream=self._stream, error=str(exc))
            return False
        return True

    async def _list(self, settled: Container[int]) -> StoredSequences:
        """Ask what the stream holds, as far as it matters: what was deleted only where the first message is settled."""
        state = (await self._ask("INFO", {}))["state"]
        if state.get("num_deleted") and state["first_seq"] in settled:
            state = (await self._ask("INFO", {"deleted_details": True}))["state"]
        return StoredSequences(state["first_seq"], state["last_seq"], frozenset(state.get("deleted") or ()))

    async def _ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask once: a second try would go over another connection.

        Raises:
            BusError: no answer over this one, or refused.
        """
        subject = f"$JS.API.STREAM.{verb}.{self._stream}"
        received = await self._api.connection.request(subject, msgspec.json.encode(body), deadline_s=TRY_DEADLINE_S)
        answer = decode_answer(subject, received.data)
        if "error" in answer:
            raise BusError(f"{subject}: {answer['error'].get('description')}")
        return answer

    def _hold(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            known = self._held.get(delivery.sequence)
            if known is not None:
                self._forget([known])
            self._held[delivery.sequence] = delivery
            self.num_bytes += delivery.stored_bytes

    def _forget(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            if self._held.get(delivery.sequence) is delivery:
                del self._held[delivery.sequence]
                self.num_bytes -= delivery.stored_bytes
