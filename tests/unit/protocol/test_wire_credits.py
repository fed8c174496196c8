"""Credits of single replies travel with their trajectory: whole, checked, and at no cost to those without any."""

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.protocol.fields import MAX_CREDITS
from areal_async.protocol.types import (
    NOT_CREDITED,
    ReplyReward,
    Sequence,
    Slot,
    SlotStatus,
    Ticket,
    Trajectory,
    Version,
    mean,
)
from areal_async.protocol.wire import (
    BYTES_PER_TOKEN,
    decode_headers,
    decode_trajectory,
    encode_message,
    encode_trajectory,
    max_encoded_bytes,
)

VERSION = Version(1, 2).pack()


def sequence_of(turns: list[int], *, has_credits: bool = True) -> Sequence:
    """One prompt token, then sampled ones: those of -1 belong to no credit."""
    length = len(turns) + 1
    mask = np.arange(length) > 0
    return Sequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, VERSION, -1).astype(np.int64),
        turns=np.array([NOT_CREDITED, *turns], dtype=np.int16) if has_credits else None,
    )


def trajectory_of(rewards: list[float], sequences: list[list[int]]) -> Trajectory:
    tokens = [turn for turns in sequences for turn in turns]
    credits = [ReplyReward(reward, tokens.count(turn), "solver") for turn, reward in enumerate(rewards)]
    slot = Slot(
        sibling=0, sample_uid="0-3-0.0.n.x", status=SlotStatus.SCORED, reward=mean(rewards), oldest="1-2",
        newest="1-2", num_tokens=len(tokens) + len(sequences), num_output_tokens=len(tokens), credits=credits,
    )  # fmt: skip
    return Trajectory(slot=slot, sequences=[sequence_of(turns) for turns in sequences])


def send(trajectory: Trajectory) -> tuple[bytes, dict[str, str]]:
    payload, headers, _ = encode_message(
        [trajectory], Ticket(row={}, group_id="0-3-0", workflow="w", version="1-2", group_size=4)
    )
    return payload, headers


def receive(payload: bytes, headers: dict[str, str], **changes: Any) -> Trajectory:
    (slot,) = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots
    return decode_trajectory(payload, msgspec.structs.replace(slot, **changes))


@st.composite
def credited(draw: st.DrawFn) -> Trajectory:
    rewards = draw(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
    turns = st.lists(st.integers(-1, len(rewards) - 1), min_size=1, max_size=20)
    return trajectory_of(rewards, draw(st.lists(turns, min_size=1, max_size=3)))


@given(credited())
def test_credits_and_the_tokens_they_are_for_come_back_as_they_were_sent(sent: Trajectory) -> None:
    payload, headers = send(sent)

    got = receive(payload, headers)

    assert got.slot.credits == sent.slot.credits
    for mine, theirs in zip(got.sequences, sent.sequences, strict=True):
        assert mine.turns is not None
        assert theirs.turns is not None
        np.testing.assert_array_equal(mine.turns, theirs.turns)
    assert len(encode_trajectory(sent)) <= max_encoded_bytes(sent)


@given(credited(), st.data())
def test_a_turn_on_another_token_than_the_credits_say_is_refused(sent: Trajectory, data: st.DataObject) -> None:
    sequence = sent.sequences[data.draw(st.integers(0, len(sent.sequences) - 1))]
    assert sequence.turns is not None
    place = data.draw(st.integers(0, sequence.num_tokens - 1))
    others = set(range(-3, len(sent.slot.credits) + 3)) - {int(sequence.turns[place])}
    sequence.turns[place] = data.draw(st.sampled_from(sorted(others)))
    payload, headers = send(sent)

    with pytest.raises(WireError, match="its header has|not sampled"):
        receive(payload, headers)


def test_a_trajectory_without_credits_takes_no_byte_more_for_them() -> None:
    plain = trajectory_of([], [[0] * 10])
    plain = Trajectory(slot=plain.slot, sequences=[sequence_of([0] * 10, has_credits=False)])

    payload, headers = send(plain)

    assert receive(payload, headers).sequences[0].turns is None
    frame = len(encode_trajectory(Trajectory(slot=plain.slot, sequences=[])))
    assert len(encode_trajectory(plain)) <= frame + 11 * BYTES_PER_TOKEN + 11
    assert b"turns" not in encode_trajectory(plain)


def test_turns_where_the_header_has_no_credits_are_refused() -> None:
    payload, headers = send(trajectory_of([0.5], [[0, 0]]))

    with pytest.raises(WireError, match="got turns, but its header has no credits"):
        receive(payload, headers, credits=[])


def test_credits_without_turns_are_refused() -> None:
    sent = trajectory_of([0.5], [[0, 0]])
    payload, headers = send(Trajectory(slot=sent.slot, sequences=[sequence_of([0, 0], has_credits=False)]))

    with pytest.raises(WireError, match="got no turns"):
        receive(payload, headers)


@pytest.mark.parametrize(
    ("turns", "match"),
    [
        (msgspec.msgpack.encode(5), "cannot decode turns"),
        (msgspec.msgpack.encode([b"\0\0"]), "turns got 2 bytes, need 6"),
        (msgspec.msgpack.encode([b"\0" * 6] * 2), "turns for 2 sequences, need 1"),
    ],
)
def test_turns_of_another_shape_are_refused(turns: bytes, match: str) -> None:
    sent = trajectory_of([0.5], [[0, 0]])
    body = msgspec.msgpack.decode(encode_trajectory(sent))
    body[5] = {"turns": msgspec.Raw(turns)}
    blob = msgspec.msgpack.encode(body)

    with pytest.raises(WireError, match=match):
        decode_trajectory(msgspec.msgpack.encode([blob]), msgspec.structs.replace(sent.slot, crc32=zlib.crc32(blob)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"status": SlotStatus.FAILED}, "need a scored one"),
        ({"num_output_tokens": 1}, "at most the 1 sampled"),
        ({"reward": 0.25}, "not the mean of its credits"),
        ({"credits": [ReplyReward(0.5, 0)] * (MAX_CREDITS + 1)}, "length <= 256"),
        ({"credits": [ReplyReward(0.5, 2, "two words")]}, "matching regex"),
        ({"credits": [ReplyReward(0.5, -1)]}, ">= 0"),
    ],
)
def test_a_header_whose_credits_contradict_it_is_refused(changes: dict[str, Any], match: str) -> None:
    sent = trajectory_of([0.5], [[0, 0]])
    _, headers = send(Trajectory(slot=msgspec.structs.replace(sent.slot, **changes), sequences=sent.sequences))

    with pytest.raises(WireError, match=match):
        decode_headers(headers, sequence=1, num_bytes=0)
