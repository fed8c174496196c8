"""Finished slots travel together, are sent again as they were, and are never dropped."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.errors import StreamFullError
from areal_async.protocol.publish_log import PublishLog, decode_stamp, read_receipts
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import NOT_SAMPLED, Sequence, Slot, SlotStatus, Ticket, Trajectory
from areal_async.protocol.wire import decode_headers, decode_trajectory, split_message
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

TICKET = Ticket(group_id="0-7-0", workflow="w", row={}, group_size=8, version="1-0")


def trajectory(sibling: int, num_tokens: int = 4, reason: str = "") -> Trajectory:
    sequence = Sequence(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.zeros(num_tokens, dtype=np.bool_),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, NOT_SAMPLED, dtype=np.int64),
    )
    slot = Slot(
        sibling=sibling,
        sample_uid=f"u{sibling}",
        status=SlotStatus.SCORED,
        reason=reason,
        num_tokens=num_tokens,
        oldest="1-0",
        newest="1-0",
    )
    return Trajectory(slot=slot, sequences=[sequence])


class Stream:
    """Stores what it is sent, unless it is full or held."""

    names = Names("r")

    def __init__(self) -> None:
        self.sent: list[tuple[str | None, bytes, Mapping[str, str]]] = []
        self.siblings: list[list[int]] = []
        self.num_refusals = 0
        self.room = anyio.Event()
        self.room.set()
        self._changed = anyio.Event()

    async def publish(
        self, subject: str, payload: bytes, *, msg_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        assert subject == "areal.r.trajectories.w.0-7-0"
        self.sent.append((msg_id, payload, dict(headers or {})))
        self._changed.set()
        if self.num_refusals:
            self.num_refusals -= 1
            raise StreamFullError("full")
        await self.room.wait()
        stored = decode_headers(headers, sequence=1, num_bytes=len(payload))
        assert all(decode_trajectory(payload, slot) for slot in stored.slots)
        self.siblings.append([slot.sibling for slot in stored.slots])

    async def wait_sent(self, count: int) -> None:
        while len(self.sent) < count:
            self._changed = anyio.Event()
            await self._changed.wait()


@pytest.fixture
def receipts(tmp_path: Path) -> PublishLog:
    return PublishLog(tmp_path, "n")


def outbox_to(
    stream: Stream,
    receipts: PublishLog,
    *,
    num_expected: int,
    linger_s: float = 60.0,
    number: int = 0,
    backpressure: Backpressure | None = None,
) -> Outbox:
    return Outbox(
        stream,
        msgspec.structs.replace(TICKET, number=number),
        producer="n.abc",
        num_expected=num_expected,
        linger_s=linger_s,
        backpressure=backpressure or Backpressure(),
        publish_log=receipts,
    )


async def test_slots_that_are_ready_together_travel_in_one_message_without_waiting_for_the_linger(
    receipts: PublishLog,
) -> None:
    stream = Stream()
    outbox = outbox_to(stream, receipts, num_expected=3)
    for sibling in (2, 0, 1):
        outbox.put(trajectory(sibling))

    await outbox.run()

    assert stream.siblings == [[2, 0, 1]]
    assert stream.sent[0][0] == "0-7-0.2_0_1.n.abc"


async def test_straggler_goes_alone_and_run_ends_only_when_every_slot_is_stored(receipts: PublishLog) -> None:
    stream = Stream()
    outbox = outbox_to(stream, receipts, num_expected=3, linger_s=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.put(trajectory(0))
        outbox.put(trajectory(1))
        await stream.wait_sent(1)
        await wait_all_tasks_blocked()
        assert stream.siblings == [[0, 1]]
        outbox.put(trajectory(2))

    assert stream.siblings == [[0, 1], [2]]


async def test_message_is_bounded_by_its_payload(receipts: PublishLog) -> None:
    stream = Stream()
    outbox = outbox_to(stream, receipts, num_expected=3)
    for sibling in range(3):
        outbox.put(trajectory(sibling, num_tokens=30_000))  # about 500 KB each

    await outbox.run()

    assert stream.siblings == [[0, 1], [2]]


async def test_message_is_bounded_by_its_headers(receipts: PublishLog) -> None:
    stream = Stream()
    outbox = outbox_to(stream, receipts, num_expected=64)
    for sibling in range(64):
        outbox.put(trajectory(sibling % 8, reason="\N{GRINNING FACE}" * 1000))

    await outbox.run()

    assert sum(len(siblings) for siblings in stream.siblings) == 64
    assert all(sum(map(len, headers.values())) < 60_000 for _, _, headers in stream.sent)


async def test_full_stream_is_sent_the_same_message_until_it_has_room(
    receipts: PublishLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.rollout.backpressure.FIRST_FULL_WAIT_S", 0.001)
    stream = Stream()
    stream.num_refusals = 3
    outbox = outbox_to(stream, receipts, num_expected=1)
    outbox.put(trajectory(0))

    await outbox.run()

    assert len(stream.sent) == 4
    assert all(sent == stream.sent[0] for sent in stream.sent)


async def test_the_group_that_was_admitted_first_gets_the_first_room(
    receipts: PublishLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.rollout.backpressure.FIRST_FULL_WAIT_S", 0.05)
    stream, backpressure = Stream(), Backpressure()
    stream.num_refusals = 2
    async with anyio.create_task_group() as tasks:
        for number in (2, 1):  # the younger one asks first
            outbox = outbox_to(stream, receipts, num_expected=1, number=number, backpressure=backpressure)
            outbox.put(trajectory(number))
            tasks.start_soon(outbox.run)
            await stream.wait_sent(3 - number)

    assert stream.siblings == [[1], [2]]
    assert backpressure.num_waiting == 0


async def test_the_loop_gets_a_turn_between_the_messages_of_groups_that_end_together(receipts: PublishLog) -> None:
    num_turns = 0
    turns_at_send: list[int] = []

    class Noting(Stream):
        async def publish(self, *args: Any, **kwargs: Any) -> None:
            turns_at_send.append(num_turns)
            await super().publish(*args, **kwargs)

    stream, backpressure = Noting(), Backpressure()
    async with anyio.create_task_group() as outboxes:
        for _ in range(8):
            outbox = outbox_to(stream, receipts, num_expected=1, backpressure=backpressure)
            outbox.put(trajectory(0))
            outboxes.start_soon(outbox.run)
        while len(turns_at_send) < 8:
            num_turns += 1
            await anyio.lowlevel.checkpoint()

    assert len(set(turns_at_send)) == 8


async def test_send_that_is_cancelled_is_repeated_as_it_was_with_what_finished_since(receipts: PublishLog) -> None:
    stream = Stream()
    stream.room = anyio.Event()
    outbox = outbox_to(stream, receipts, num_expected=3, linger_s=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.put(trajectory(0))
        await stream.wait_sent(1)
        outbox.put(trajectory(1))
        stream.room = anyio.Event()
        stream.room.set()
        tasks.cancel_scope.cancel()

    assert stream.siblings == [[0], [1]]
    assert stream.sent[0] == stream.sent[1]
    assert [msg_id for msg_id, _, _ in stream.sent] == ["0-7-0.0.n.abc", "0-7-0.0.n.abc", "0-7-0.1.n.abc"]


async def test_cancelled_outbox_stops_trying_after_its_deadline(
    receipts: PublishLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.rollout.publish.FLUSH_DEADLINE_S", 0.01)
    stream = Stream()
    stream.room = anyio.Event()
    outbox = outbox_to(stream, receipts, num_expected=1)
    outbox.put(trajectory(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert stream.siblings == []


async def test_what_is_acknowledged_is_numbered_and_noted_and_what_is_refused_is_not(
    receipts: PublishLog, tmp_path: Path
) -> None:
    stream = Stream()
    outbox = outbox_to(stream, receipts, num_expected=3, linger_s=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.put(trajectory(0))
        outbox.put(trajectory(2))
        await stream.wait_sent(1)
        await wait_all_tasks_blocked()
        stream.room = anyio.Event()
        outbox.put(trajectory(1))
        await stream.wait_sent(2)
        noted = read_receipts(tmp_path)[receipts.producer].receipts
        stream.room.set()

    stamps = [decode_stamp(headers) for _, _, headers in stream.sent]
    assert [(stamp.number, stamp.num_acknowledged) for stamp in stamps if stamp] == [(1, 0), (2, 1)]
    assert [(one.number, [slot.sibling for slot in one.slots]) for one in noted] == [(1, [0, 2])]
    noted = read_receipts(tmp_path)[receipts.producer].receipts
    sent = [zlib.crc32(blob) for _, payload, _ in stream.sent for blob in split_message(payload)]
    assert [slot.crc32 for one in noted for slot in one.slots] == sent
