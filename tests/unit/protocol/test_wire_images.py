"""The images that a sequence looks at travel with it by reference, and a sequence without any takes no byte for it."""

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.protocol.fields import MAX_IMAGE_BYTES, MAX_IMAGE_SIDE, MAX_IMAGES
from areal_async.protocol.types import ImageRef, Sequence, Slot, SlotStatus, Trajectory, Version
from areal_async.protocol.wire import decode_trajectory, encode_trajectory, max_encoded_bytes

NUM_TOKENS = 8
WITHOUT_IMAGES = bytes.fromhex(
    "960100ab302d332d302e302e6e2e78919508c4200000000001000000020000000300000004000000050000000600000007000000c408"
    "0101010101010101c420000000bf000000bf000000bf000000bf000000bf000000bf000000bf000000bfc44002000000010000000200"
    "000001000000020000000100000002000000010000000200000001000000020000000100000002000000010000000200000001000000"
    "8080"
)
"""A payload as it was before there were images."""
refs = st.builds(
    ImageRef,
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    num_bytes=st.integers(1, MAX_IMAGE_BYTES),
    width=st.integers(1, MAX_IMAGE_SIDE),
    height=st.integers(1, MAX_IMAGE_SIDE),
)


def trajectory_of(*sequences: list[ImageRef] | None) -> Trajectory:
    num_tokens = NUM_TOKENS * len(sequences)
    slot = Slot(
        sibling=0, sample_uid="0-3-0.0.n.x", status=SlotStatus.SCORED, oldest="1-2", newest="1-2",
        num_tokens=num_tokens, num_output_tokens=num_tokens,
    )  # fmt: skip
    return Trajectory(
        slot=slot,
        sequences=[
            Sequence(
                token_ids=np.arange(NUM_TOKENS, dtype=np.int32),
                loss_mask=np.ones(NUM_TOKENS, dtype=np.bool_),
                logprobs=np.full(NUM_TOKENS, -0.5, dtype=np.float32),
                versions=np.full(NUM_TOKENS, Version(1, 2).pack(), dtype=np.int64),
                images=images,
            )
            for images in sequences
        ],
    )


def received(blob: bytes, slot: Slot) -> Trajectory:
    return decode_trajectory(msgspec.msgpack.encode([blob]), msgspec.structs.replace(slot, crc32=zlib.crc32(blob)))


@given(st.lists(st.none() | st.lists(refs, min_size=1, max_size=NUM_TOKENS), max_size=4))
def test_every_image_comes_back_in_its_place(sequences: list[list[ImageRef] | None]) -> None:
    sent = trajectory_of(*sequences)
    assume({ref for images in sequences for ref in images or ()} == set(sent.images.values()))  # of one hash all alike
    blob = encode_trajectory(sent)

    assert [one.images for one in received(blob, sent.slot).sequences] == sequences
    assert len(blob) <= max_encoded_bytes(sent)


def test_a_payload_without_images_is_what_it_was_and_is_still_read() -> None:
    sent = trajectory_of(None)

    assert encode_trajectory(sent) == WITHOUT_IMAGES
    assert encode_trajectory(trajectory_of([])) == WITHOUT_IMAGES
    assert received(WITHOUT_IMAGES, sent.slot).sequences[0].images is None


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (5, "cannot decode images"),
        ([[[b"x" * 31, 1, 1, 1]]], "cannot decode images: .*length >= 32"),
        ([[[b"x" * 33, 1, 1, 1]]], "cannot decode images: .*length <= 32"),
        ([[["x" * 32, 1, 1, 1]]], "cannot decode images"),
        ([[[b"x" * 32, 1, 1]]], "cannot decode images: .*length"),
        ([[[b"x" * 32, 0, 1, 1]]], "cannot decode images: .*>= 1"),
        ([[[b"x" * 32, MAX_IMAGE_BYTES + 1, 1, 1]]], f"cannot decode images: .*<= {MAX_IMAGE_BYTES}"),
        ([[[b"x" * 32, 1, 0, 1]]], "cannot decode images: .*>= 1"),
        ([[[b"x" * 32, 1, 1, MAX_IMAGE_SIDE + 1]]], f"cannot decode images: .*<= {MAX_IMAGE_SIDE}"),
        ([[[b"x" * 32, 1, 1, 1]]] * 2, "images for 2 sequences, need 1"),
        (
            [[[b"x" * 32, 1, 1, 1], [b"x" * 32, 1, 1, 2]]],
            "of 1 x 2 pixels in 1 bytes, and of 1 x 1 in 1, need one size",
        ),
        ([[[b"x" * 32, 1, 1, 1]] * 9], f"9 images for 8 tokens, need at most one each, and {MAX_IMAGES}"),
    ],
)
def test_what_is_no_image_is_refused(said: Any, match: str) -> None:
    sent = trajectory_of(None)
    body = msgspec.msgpack.decode(encode_trajectory(sent))
    body[5] = {"images": said}

    with pytest.raises(WireError, match=match):
        received(msgspec.msgpack.encode(body), sent.slot)


def test_two_sequences_do_not_differ_in_the_size_of_one_image() -> None:
    """A trainer reads the file once: what the second says would be held against nothing, and fail its step."""
    small = ImageRef(sha256="7" * 64, num_bytes=9, width=32, height=32)
    sent = trajectory_of([small], [msgspec.structs.replace(small, width=64)])

    with pytest.raises(WireError, match="of 64 x 32 pixels in 9 bytes, and of 32 x 32 in 9, need one size"):
        received(encode_trajectory(sent), sent.slot)
