"""The outbox of one group: finished slots travel together, and reach the stream whatever happens to it.

Invariant: a message's content and id are frozen at its first send, so that every retry is the same message
and is stored once. What a trajectory shows is stored before it. A full stream makes the group wait, for ever but
visibly; nothing is dropped. What is acknowledged is noted apart from the broker (``publish_log``).
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from areal_async.bus import Bus
from areal_async.config.settings import MESSAGE_BYTES
from areal_async.errors import StoredImageError, UserError
from areal_async.process.bell import Bell
from areal_async.protocol.publish_log import STAMP_HEADER, ProducerSequence, PublishLog, encode_stamp
from areal_async.protocol.types import ImageRef, Slot, Ticket, Trajectory
from areal_async.protocol.wire import encode_message, max_encoded_bytes
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.rewards.reply_rewards import credit_bytes
from areal_async.rollout.slots import MAX_REASON_CHARACTERS, failed_trajectory
from areal_async.telemetry import spans
from areal_async.vision.images import Image

FLUSH_DEADLINE_S = 10.0
"""How long a group that is cancelled goes on storing what is finished."""
MAX_HEADER_BYTES = 48 << 10
"""The broker refuses headers of more than 64 KB."""
MIN_REASON_CHARACTERS = 60
"""Length to which a failed sibling's reason is cut at most, where those of a whole group share the headers."""
SLOT_HEADER_BYTES = 512
"""Size of one slot in the headers, beside its reason and its credits."""


class _Finished(NamedTuple):
    trajectory: Trajectory
    images: Mapping[str, Image]
    """SHA-256 -> each that it shows, and perhaps others."""


class _Frozen(NamedTuple):
    payload: bytes
    headers: Mapping[str, str]
    msg_id: str
    sequence: ProducerSequence
    slots: list[Slot]


class Outbox:
    """Takes the slots of one group with ``put``; ``run`` stores them."""

    def __init__(
        self,
        bus: Bus,
        ticket: Ticket,
        *,
        producer: str,
        num_expected: int,
        linger_s: float,
        backpressure: Backpressure,
        publish_log: PublishLog,
        max_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """``max_bytes``: slots that are ready together travel together up to this size."""
        self._bus = bus
        self._subject = bus.names.trajectories(ticket.workflow, ticket.group_id)
        self._ticket = ticket
        self._producer = producer
        self.num_left = num_expected
        """Slots that are not stored yet."""
        self._linger_s = linger_s
        self._backpressure = backpressure
        self._publish_log = publish_log
        self._max_bytes = max_bytes
        self._ready: list[_Finished] = []
        self._stored_images: set[ImageRef] = set()
        self._changed = Bell()
        self._in_flight: _Frozen | None = None

    def put(self, trajectory: Trajectory, images: Mapping[str, Image] = MappingProxyType({})) -> None:
        """Hand over a finished slot, with the images that it shows by their SHA-256."""
        self._ready.append(_Finished(trajectory, images))
        self._changed.ring()

    async def run(self) -> None:
        """Return when every expected slot is stored.

        consumes:     finished slots
        waits for:    the next one, then ``linger_s`` for others to travel with it
        produces:     the images of the group that are not stored yet, then messages on its trajectory subject
        unblocked by: the streams having room
        When cancelled it stores, for a bounded time, what is finished.
        """
        try:
            while self.num_left:
                await self._wait_ready(1)
                with anyio.move_on_after(self._linger_s):
                    await self._wait_ready(self.num_left)
                await self._send_ready()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(FLUSH_DEADLINE_S, shield=True):
                await self._send_ready()
            raise

    async def _wait_ready(self, num_slots: int) -> None:
        while len(self._ready) < num_slots:
            await self._changed.wait()

    async def _send_ready(self) -> None:
        while self._ready or self._in_flight:
            # Kept while it is being sent: a cancelled send is repeated as it was.
            if self._in_flight is None:
                await self._store_images()
                async with self._backpressure.encoding:
                    self._in_flight = self._freeze()
                    await anyio.lowlevel.checkpoint()
            message = self._in_flight
            publish = partial(
                self._bus.publish, self._subject, message.payload, msg_id=message.msg_id, headers=message.headers
            )
            with spans.published(self._ticket, message.slots, num_bytes=len(message.payload)):
                await self._backpressure.store(publish, number=self._ticket.number)
            self._publish_log.acknowledge(message.sequence, group_id=self._ticket.group_id, slots=message.slots)
            self.num_left -= len(message.slots)
            self._in_flight = None

    async def _store_images(self) -> None:
        """Store what the finished slots show; one whose image cannot be stored has failed."""
        number = 0
        while number < len(self._ready):
            trajectory, images = self._ready[number]
            try:
                for ref in self._unstored(trajectory):
                    put = partial(self._bus.images.put, self._ticket.group_id, ref, images[ref.sha256].data)
                    await self._backpressure.store(put, number=self._ticket.number)
                    self._stored_images.add(ref)
            except (UserError, StoredImageError) as exc:
                self._ready[number] = _Finished(failed_trajectory(trajectory.slot, str(exc)), {})
            number += 1

    def _unstored(self, trajectory: Trajectory) -> list[ImageRef]:
        return [ref for ref in trajectory.images.values() if ref not in self._stored_images]

    def _freeze(self) -> _Frozen:
        """Take as many finished slots as fit into one message; no image of the first is missing."""
        taken = [self._ready.pop(0).trajectory]
        num_bytes = max_encoded_bytes(taken[0])
        num_header_bytes = header_bytes(taken[0])
        while self._ready:
            following = self._ready[0].trajectory
            num_bytes += max_encoded_bytes(following)
            num_header_bytes += header_bytes(following)
            if num_bytes > self._max_bytes or num_header_bytes > MAX_HEADER_BYTES or self._unstored(following):
                break
            taken.append(self._ready.pop(0).trajectory)
        ticket = self._ticket
        payload, headers, slots = encode_message(taken, ticket)
        sequence = self._publish_log.stamp()
        headers[STAMP_HEADER] = encode_stamp(sequence)
        siblings = "_".join(str(slot.sibling) for slot in slots)
        msg_id = f"{ticket.group_id}.{siblings}.{self._producer}"
        return _Frozen(payload, headers, msg_id, sequence, slots)


def header_bytes(trajectory: Trajectory) -> int:
    """Return what a slot takes of its message's headers, at the most."""
    reason = trajectory.slot.reason
    return SLOT_HEADER_BYTES + (len(json.dumps(reason)) if reason else 0) + credit_bytes(trajectory.slot.credits)


def fit_one_message(trajectories: Sequence[Trajectory], *, max_bytes: int) -> list[Trajectory]:
    """Return the trajectories of a group as they can travel in one message; too large ones as recorded failures."""
    num_header_bytes = sum(header_bytes(_with_short_reason(one, MIN_REASON_CHARACTERS)) for one in trajectories)
    num_bytes = sum(map(max_encoded_bytes, trajectories))
    if num_bytes > max_bytes or num_header_bytes > MAX_HEADER_BYTES:
        reason = (
            f"group: got {num_bytes} bytes and {num_header_bytes} of headers, need at most {max_bytes} "
            f"(rollout.max_trajectory_bytes) and {MAX_HEADER_BYTES}: a group workflow's siblings share one message; "
            "generate less, or lower rollout.group_size"
        )
        trajectories = [failed_trajectory(one.slot, reason) for one in trajectories]
    fitted, num_characters = list(trajectories), MAX_REASON_CHARACTERS
    while sum(map(header_bytes, fitted)) > MAX_HEADER_BYTES and num_characters > MIN_REASON_CHARACTERS:
        num_characters = max(MIN_REASON_CHARACTERS, num_characters * 3 // 4)
        fitted = [_with_short_reason(one, num_characters) for one in trajectories]
    return fitted


def _with_short_reason(trajectory: Trajectory, num_characters: int) -> Trajectory:
    """Return it with a reason of so many characters at the most."""
    slot = trajectory.slot
    if len(slot.reason) <= num_characters:
        return trajectory
    return msgspec.structs.replace(trajectory, slot=msgspec.structs.replace(slot, reason=slot.reason[:num_characters]))
