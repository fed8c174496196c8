"""What goes over the wire comes back the same, and nothing else comes in."""

import gc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import Outcome, OutcomeKind, Sequence, Slot, SlotStatus, Ticket, Trajectory, Version
from areal_async.protocol.wire import (
    decode,
    decode_headers,
    decode_trajectory,
    encode,
    encode_message,
    encode_trajectory,
    max_encoded_bytes,
)


def _trajectory(length: int = 5, *, sibling: int = 0, reason: str = "") -> Trajectory:
    mask = np.arange(length) >= length // 2
    return Trajectory(
        slot=Slot(
            sibling=sibling,
            sample_uid=f"0-3-0.{sibling}.node-a.x",
            status=SlotStatus.SCORED,
            reward=0.5,
            reason=reason,
            oldest="1-2",
            newest="1-3",
            num_tokens=length,
        ),
        sequences=[
            Sequence(
                token_ids=np.arange(length, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -0.25, 0).astype(np.float32),
                versions=np.where(mask, Version(1, 2).pack(), -1).astype(np.int64),
            )
        ],
        info={"turns": 1.0},
    )


@given(st.integers(1, 300), st.integers(0, 4), st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_what_a_trajectory_takes_at_most_is_known_before_it_is_encoded(
    length: int, num_sequences: int, info: dict[str, float]
) -> None:
    one = _trajectory(length)
    trajectory = Trajectory(slot=one.slot, sequences=one.sequences * num_sequences, info=info)

    num_bytes = len(encode_trajectory(trajectory))

    assert (
        num_bytes
        <= max_encoded_bytes(trajectory)
        <= num_bytes + 200 + 32 * num_sequences + sum(20 + 4 * len(key) for key in info)
    )


def _message(*trajectories: Trajectory) -> tuple[bytes, dict[str, str]]:
    payload, headers, _ = encode_message(
        trajectories,
        Ticket(row={}, group_id="0-3-0", workflow="gsm8k", version="1-2", num_failed_attempts=1, group_size=8),
    )
    return payload, headers


@given(st.integers(min_value=1, max_value=300))
def test_a_trajectory_comes_back_as_it_was_sent(length: int) -> None:
    sent = _trajectory(length)
    payload, headers = _message(sent)

    stored = decode_headers(headers, sequence=9, num_bytes=len(payload))
    got = decode_trajectory(payload, stored.slots[0])

    assert (stored.group_id, stored.num_failed_attempts, stored.sequence) == ("0-3-0", 1, 9)
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(got.sequences[0], name), getattr(sent.sequences[0], name))
    assert got.info == sent.info


def test_slots_of_one_message_are_told_apart() -> None:
    payload, headers = _message(_trajectory(4, sibling=2), _trajectory(6, sibling=5))

    stored = decode_headers(headers, sequence=1, num_bytes=len(payload))

    assert [decode_trajectory(payload, slot).sequences[0].num_tokens for slot in stored.slots] == [4, 6]


def test_the_garbage_collector_looks_at_no_slot_of_a_message() -> None:
    payload, headers = _message(_trajectory(), _trajectory(sibling=1))
    message = decode_headers(headers, sequence=1, num_bytes=len(payload))

    assert not gc.is_tracked(message)
    assert not any(gc.is_tracked(slot) for slot in message.slots)


def test_headers_are_ascii_without_line_breaks_whatever_the_reason_says() -> None:
    _, headers = _message(_trajectory(reason="Zeile 1\nZeile 2\r\n漢字 \x00"))

    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert decode_headers(headers, sequence=1, num_bytes=0).slots[0].reason == "Zeile 1\nZeile 2\r\n漢字 \x00"


def test_a_flipped_bit_is_found() -> None:
    payload, headers = _message(_trajectory(50))
    slot = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots[0]
    damaged = bytearray(payload)
    damaged[len(payload) // 2] ^= 1

    with pytest.raises(WireError, match=r"checksum|decode"):
        decode_trajectory(bytes(damaged), slot)


def test_another_slots_payload_is_refused() -> None:
    payload, headers = _message(_trajectory(sibling=0), _trajectory(sibling=1))
    first, second = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots
    swapped = msgspec.structs.replace(first, index=second.index, crc32=second.crc32)

    with pytest.raises(WireError, match="got the payload of"):
        decode_trajectory(payload, swapped)


@pytest.mark.parametrize("num_tokens", [0, -1, 4, 6, 2**40])
def test_a_length_that_does_not_fit_its_buffers_is_refused(num_tokens: int) -> None:
    body = msgspec.msgpack.decode(encode_trajectory(_trajectory(5)))
    body[3][0][0] = num_tokens
    blob = msgspec.msgpack.encode(body)
    slot = msgspec.structs.replace(_trajectory(5).slot, crc32=zlib.crc32(blob))

    with pytest.raises(WireError):
        decode_trajectory(msgspec.msgpack.encode([blob]), slot)


@given(st.binary(max_size=200))
def test_noise_is_never_more_than_a_wire_error(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode_trajectory(noise, _trajectory().slot)
    with pytest.raises(WireError):
        decode(noise, Ticket)


def test_a_sibling_outside_its_group_is_refused() -> None:
    _, headers = _message(_trajectory(sibling=8))

    with pytest.raises(WireError, match="siblings outside"):
        decode_headers(headers, sequence=1, num_bytes=0)


def test_records_are_json_with_a_schema_number() -> None:
    outcome = Outcome(group_id="0-1-0", kind=OutcomeKind.FAILED, lineage=2, reason="it broke")

    data = encode(outcome)

    assert msgspec.json.decode(data)["schema"] == 1
    assert decode(data, Outcome) == outcome


def test_another_schema_is_refused_by_number() -> None:
    data = encode(Outcome(group_id="0-1-0", kind=OutcomeKind.FAILED, lineage=2)).replace(b'"schema":1', b'"schema":7')

    with pytest.raises(WireError, match="got schema 7, need 1"):
        decode(data, Outcome)


@pytest.mark.parametrize(
    ("column", "value", "match"),
    [
        ("token_ids", -1, "token id -1"),
        ("logprobs", np.nan, "no finite number"),
        ("versions", Version(1, 1).pack(), "versions outside 1-2 to 1-3"),
        ("versions", Version(2, 0).pack(), "versions outside 1-2 to 1-3"),
        ("versions", -1, "versions outside 1-2 to 1-3"),
    ],
)
def test_tokens_that_belie_their_header_are_refused(column: str, value: float, match: str) -> None:
    honest = _trajectory(5)
    (sequence,) = honest.sequences
    getattr(sequence, column)[-1] = value
    payload, headers = _message(honest)
    (slot,) = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots

    with pytest.raises(WireError, match=match):
        decode_trajectory(payload, slot)


def test_a_count_of_tokens_that_differs_from_the_header_is_refused() -> None:
    payload, headers = _message(_trajectory(5))
    (slot,) = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots

    with pytest.raises(WireError, match="got 5 tokens, its header says 6"):
        decode_trajectory(payload, msgspec.structs.replace(slot, num_tokens=6))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_id", "0-1"), ("group_id", "0-1-0\n"), ("group_id", "0-1-" + "9" * 30), ("workflow", "a.b"),
        ("workflow", ""), ("version", "1"), ("version", "99999999999-0"), ("group_size", 0), ("group_size", 1 << 30),
        ("number", -1),
    ],
)  # fmt: skip
def test_a_ticket_that_nobody_could_work_on_is_refused(field: str, value: str | int) -> None:
    sound = Ticket(group_id="0-1-0", workflow="w", row={}, group_size=8, version="1-2")

    with pytest.raises(WireError, match=field):
        decode(encode(msgspec.structs.replace(sound, **{field: value})), Ticket)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_ranks", -1), ("num_ranks", 0), ("num_ranks", 257), ("num_ranks", 1 << 53), ("incarnation", "x" * 65)],
)
def test_a_server_for_which_a_broadcast_would_have_no_room_is_refused(field: str, value: str | int) -> None:
    server = ServerState(server_id="0-0", node_id="0", url="", version="", num_ranks=256, incarnation="x" * 64)
    assert decode(encode(server), ServerState) == server

    with pytest.raises(WireError, match=field):
        decode(encode(msgspec.structs.replace(server, **{field: value})), ServerState)
