"""What each token was sampled at travels with it, and whether it was steered.

A number for each stretch of tokens, and none where nothing is known.
"""

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.protocol import wire
from areal_async.protocol.types import Sequence, Slot, SlotStatus, Trajectory, Version
from areal_async.protocol.wire import decode_trajectory, encode_trajectory, max_encoded_bytes

Temperatures = list[float] | None
temperatures = st.none() | st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 100.0]), min_size=1, max_size=30)


def trajectory_of(*sequences: Temperatures) -> Trajectory:
    lengths = [3 if one is None else len(one) for one in sequences]
    slot = Slot(
        sibling=0, sample_uid="0-3-0.0.n.x", status=SlotStatus.SCORED, oldest="1-2", newest="1-2",
        num_tokens=sum(lengths), num_output_tokens=sum(lengths),
    )  # fmt: skip
    return Trajectory(
        slot=slot,
        sequences=[
            Sequence(
                token_ids=np.arange(length, dtype=np.int32),
                loss_mask=np.ones(length, dtype=np.bool_),
                logprobs=np.full(length, -0.5, dtype=np.float32),
                versions=np.full(length, Version(1, 2).pack(), dtype=np.int64),
                temperatures=None if one is None else np.array(one, dtype=np.float32),
                steered=None if one is None else np.array(one) < 0.5,
            )
            for length, one in zip(lengths, sequences, strict=True)
        ],
    )


def received(blob: bytes, slot: Slot) -> Trajectory:
    return decode_trajectory(msgspec.msgpack.encode([blob]), msgspec.structs.replace(slot, crc32=zlib.crc32(blob)))


@given(st.lists(temperatures, max_size=4))
def test_every_token_comes_back_with_its_own(sequences: list[Temperatures]) -> None:
    sent = trajectory_of(*sequences)
    blob = encode_trajectory(sent)

    got = received(blob, sent.slot)

    for mine, theirs in zip(got.sequences, sent.sequences, strict=True):
        if theirs.temperatures is None:
            assert mine.temperatures is mine.steered is None
        else:
            assert mine.temperatures is not None
            assert mine.steered is not None
            assert (mine.temperatures.dtype, mine.steered.dtype) == (np.float32, np.bool_)
            np.testing.assert_array_equal(mine.temperatures, theirs.temperatures)
            np.testing.assert_array_equal(mine.steered, np.array(theirs.temperatures) < 0.5)
    assert len(blob) <= max_encoded_bytes(sent)


def test_a_sequence_of_one_temperature_takes_a_few_bytes_more_for_it_and_one_of_none_takes_none() -> None:
    long, plain = trajectory_of([0.7] * 5000), trajectory_of(None)
    bare = Trajectory(
        slot=long.slot, sequences=[msgspec.structs.replace(long.sequences[0], temperatures=None)], info=long.info
    )

    assert len(encode_trajectory(long)) - len(encode_trajectory(bare)) < 32
    assert b"temperatures" not in encode_trajectory(plain)
    assert b"steered" not in encode_trajectory(plain)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (5, "cannot decode temperatures"),
        ([[[3, "hot"]]], "cannot decode temperatures"),
        ([[[3, 1.0]]] * 2, "temperatures for 2 sequences, need 1"),
        ([[[2, 1.0]]], "temperatures for 2 tokens, need them for 3"),
        ([[[4, 1.0], [-1, 0.5]]], "temperatures for 3 tokens, need them for 3, each once"),
        ([[[2**62, 1.0], [2**62, 1.0]]], "need them for 3"),
        ([[[3, -0.5]]], "temperatures outside of 0 to 100"),
        ([[[2, 1.0], [1, float("nan")]]], "temperatures outside of 0 to 100"),
        ([[[3, 1e300]]], "temperatures outside of 0 to 100"),
    ],
)
def test_what_is_no_temperature_for_each_token_is_refused(said: Any, match: str) -> None:
    sent = trajectory_of([1.0, 1.0, 0.5])
    body = msgspec.msgpack.decode(encode_trajectory(sent))
    body[5] = {"temperatures": said}

    with pytest.raises(WireError, match=match):
        received(msgspec.msgpack.encode(body), sent.slot)

    body[5] = {"steered": said}
    with pytest.raises(WireError, match=match.replace("temperatures", "steered").replace("100", "1")):
        received(msgspec.msgpack.encode(body), sent.slot)


def test_the_size_is_told_without_writing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = trajectory_of([0.7, 0.7, 0.3], None)
    num_bytes = max_encoded_bytes(sent)
    for name in ("_runs", "encode_trajectory"):
        monkeypatch.delattr(wire, name)

    assert max_encoded_bytes(sent) == num_bytes
