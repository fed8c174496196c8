"""Bytes on the bus: how records and trajectories are encoded, and the checks on the way in.

Small records are JSON with a ``schema`` number, so that any NATS tool can read them. A trajectory
message is msgpack: one blob per slot, in it raw little-endian buffers. Its headers carry the slots'
headers, so that a batch is cut without reading a payload. Every length is checked before a buffer is
read, and every value before it is believed; nothing is ever unpickled.

Every decoder here ends in a value or in ``WireError``, whatever the bytes are.
"""

import functools
import json
import math
import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.errors import WireError
from areal_async.protocol.fields import (
    MAX_IMAGES,
    MAX_TEMPERATURE,
    GroupIdText,
    GroupSize,
    NumAttempts,
    NumImageBytes,
    NumPixels,
    TokenText,
    VersionText,
)
from areal_async.protocol.types import (
    NOT_CREDITED,
    NOT_SAMPLED,
    ImageRef,
    Record,
    Sequence,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Trajectory,
    Version,
    mean,
)

SCHEMA = 1
GROUP_HEADER = "Areal-Group"
SLOTS_HEADER = "Areal-Slots"
MAX_SEQUENCES = 4096
MAX_TOKENS = 1 << 24
MAX_REASON_CHARACTERS = 2000

R = TypeVar("R", bound=Record)
T = TypeVar("T")

_MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions of msgspec for what it cannot read as the wanted type; in a header what is no UTF-8 is surrogates."""


def encode(record: Record) -> bytes:
    """Encode a record as one JSON object with its schema number."""
    return msgspec.json.encode({"schema": SCHEMA, **msgspec.structs.asdict(record)})


def decode(data: bytes | str, kind: type[R]) -> R:
    """Decode a record of the given kind.

    Raises:
        WireError: not JSON, another schema, or fields that do not fit.
    """
    schema = decode_json(data, _Schema, what=kind.__name__).schema
    if schema != SCHEMA:
        raise WireError(f"{kind.__name__}: got schema {schema}, need {SCHEMA}; upgrade the older side")
    return decode_json(data, kind, what=kind.__name__)


def decode_json(data: bytes | str, kind: type[T], *, what: str) -> T:
    """Decode JSON that carries no schema number (a report of a role, an answer, a file of ours).

    Raises:
        WireError: not JSON, or of another shape.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except _MALFORMED as exc:
        raise WireError(f"{what}: cannot decode {len(data)} bytes: {exc}") from exc


class _Schema(msgspec.Struct):
    schema: int


class _SequencePayload(msgspec.Struct, array_like=True):
    num_tokens: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes


class _SlotPayload(msgspec.Struct, array_like=True):
    schema: int
    sibling: int
    sample_uid: str
    sequences: list[_SequencePayload]
    info: dict[str, float]
    extensions: dict[str, msgspec.Raw] = {}
    """A place for later fields. ``turns``: a buffer per sequence, where the slot has credits.
    ``temperatures``: for each sequence how many tokens have which, one after the other; none where nothing is known.
    ``steered``: likewise, 1 for those that were and 0 for the others.
    ``images``: for each sequence those that it looks at."""


class _ImagePayload(msgspec.Struct, array_like=True):
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """The SHA-256 of ``ImageRef``, as bytes."""
    num_bytes: NumImageBytes
    width: NumPixels
    height: NumPixels


class _GroupHeader(Record, frozen=True, kw_only=True):
    schema: int
    group_id: GroupIdText
    workflow: TokenText
    ticket_version: VersionText
    num_failed_attempts: NumAttempts
    group_size: GroupSize


_COLUMNS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("token_ids", np.dtype("<i4")),
    ("loss_mask", np.dtype("|b1")),
    ("logprobs", np.dtype("<f4")),
    ("versions", np.dtype("<i8")),
)
BYTES_PER_TOKEN = sum(dtype.itemsize for _, dtype in _COLUMNS)
_TURNS = "turns"
_TURNS_DTYPE = np.dtype("<i2")
_TEMPERATURES = "temperatures"
_STEERED = "steered"
_IMAGES = "images"
_Runs = list[tuple[int, float]]
"""Numbers of tokens, and what each of so many have."""
_SLOT_FRAME_BYTES = 64
_INFO_FRAME_BYTES = 16
_SEQUENCE_FRAME_BYTES = 32
_TURNS_FRAME_BYTES = 16
_RUNS_FRAME_BYTES = 24
_RUN_BYTES = 20
"""Bound of what msgpack adds to a run: up to 9 bytes for a number, and 5 for a length."""
_IMAGE_BYTES = 48
"""Bound of an image's 32 bytes of hash, its three numbers and their frame."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encode the payload of one slot. The caller puts its ``crc32`` into the slot's header."""
    return msgspec.msgpack.encode(
        _SlotPayload(
            schema=SCHEMA,
            sibling=trajectory.slot.sibling,
            sample_uid=trajectory.slot.sample_uid,
            sequences=[
                _SequencePayload(
                    sequence.num_tokens,
                    *[getattr(sequence, name).astype(dtype, copy=False).tobytes() for name, dtype in _COLUMNS],
                )
                for sequence in trajectory.sequences
            ],
            info=trajectory.info,
            extensions=_extensions(trajectory.sequences),
        )
    )


def _extensions(sequences: Seq[Sequence]) -> dict[str, msgspec.Raw]:
    """Return what only some slots have."""
    values: dict[str, list[Any]] = {
        _TURNS: [one.turns.astype(_TURNS_DTYPE).tobytes() for one in sequences if one.turns is not None],
        _TEMPERATURES: [_runs(one.temperatures) for one in sequences],
        _STEERED: [_runs(one.steered) for one in sequences],
        _IMAGES: [[_image_payload(image) for image in one.images or ()] for one in sequences],
    }
    return {name: msgspec.Raw(msgspec.msgpack.encode(column)) for name, column in values.items() if any(column)}


def _image_payload(image: ImageRef) -> _ImagePayload:
    return _ImagePayload(bytes.fromhex(image.sha256), image.num_bytes, image.width, image.height)


def _runs(values: NDArray[Any] | None) -> _Runs:
    """Return what the tokens of a sequence have, neighbours of one value as one; nothing where it is not known."""
    if values is None:
        return []
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(end - start, float(values[start])) for start, end in pairwise(edges)]


def _num_runs(values: NDArray[Any]) -> int:
    """Return how many runs ``_runs`` makes of them."""
    return 1 + int(np.count_nonzero(values[1:] != values[:-1]))


def max_encoded_bytes(trajectory: Trajectory) -> int:
    """Return what ``encode_trajectory`` needs at most, without encoding."""
    num_bytes = _SLOT_FRAME_BYTES + 4 * len(trajectory.slot.sample_uid)
    num_bytes += sum(_INFO_FRAME_BYTES + 4 * len(key) for key in trajectory.info)
    for sequence in trajectory.sequences:
        num_bytes += _SEQUENCE_FRAME_BYTES + sequence.num_tokens * BYTES_PER_TOKEN
        if sequence.turns is not None:
            num_bytes += _TURNS_FRAME_BYTES + sequence.num_tokens * _TURNS_DTYPE.itemsize
        for values in (sequence.temperatures, sequence.steered):
            num_bytes += 1 if values is None else _RUNS_FRAME_BYTES + _RUN_BYTES * _num_runs(values)
        num_bytes += 1 if not sequence.images else _RUNS_FRAME_BYTES + _IMAGE_BYTES * len(sequence.images)
    return num_bytes


class EncodedMessage(NamedTuple):
    """One message, ready to be sent."""

    payload: bytes
    headers: dict[str, str]
    slots: list[Slot]
    """Slots with ``crc32`` and ``index`` filled in, as in the headers: content and headers cannot disagree."""


def encode_message(trajectories: Seq[Trajectory], ticket: Ticket) -> EncodedMessage:
    """Encode some slots of one ticket's group as one message."""
    blobs = [encode_trajectory(one) for one in trajectories]
    slots = [
        msgspec.structs.replace(
            one.slot, crc32=zlib.crc32(blob), index=index, reason=one.slot.reason[:MAX_REASON_CHARACTERS]
        )
        for index, (one, blob) in enumerate(zip(trajectories, blobs, strict=True))
    ]
    group = _GroupHeader(
        schema=SCHEMA, group_id=ticket.group_id, workflow=ticket.workflow, ticket_version=ticket.version,
        num_failed_attempts=ticket.num_failed_attempts, group_size=ticket.group_size,
    )  # fmt: skip
    headers = {GROUP_HEADER: _ascii_json(group), SLOTS_HEADER: _ascii_json(slots)}
    return EncodedMessage(msgspec.msgpack.encode(blobs), headers, slots)


def decode_headers(
    headers: Mapping[str, str] | None, *, sequence: int, num_bytes: int, stored_ns: int = 0
) -> StoredMessage:
    """Read a trajectory message's headers; the numbers are the message's own (``StoredMessage``).

    Raises:
        WireError: a header is missing or does not fit.
    """
    what = f"trajectory message {sequence}"
    try:
        group = decode_json((headers or {})[GROUP_HEADER], _GroupHeader, what=f"{what}: {GROUP_HEADER}")
        slots = decode_json((headers or {})[SLOTS_HEADER], list[Slot], what=f"{what}: {SLOTS_HEADER}")
    except KeyError as exc:
        raise WireError(f"{what}: header {exc} is missing") from exc
    if group.schema != SCHEMA:
        raise WireError(f"{what}: got schema {group.schema}, need {SCHEMA}; upgrade the older side")
    if not slots or any(slot.sibling >= group.group_size for slot in slots):
        raise WireError(f"{what}: got siblings outside 0..{group.group_size - 1}")
    if any(_pack(slot.oldest) > _pack(slot.newest) for slot in slots):
        raise WireError(f"{what}: got a slot whose oldest version is newer than its newest")
    for slot in slots:
        _check_credits(slot, what)
    return StoredMessage(
        group_id=group.group_id, workflow=group.workflow, ticket_version=group.ticket_version,
        num_failed_attempts=group.num_failed_attempts, group_size=group.group_size, slots=slots,
        sequence=sequence, num_bytes=num_bytes, stored_ns=stored_ns,
    )  # fmt: skip


def _check_credits(slot: Slot, what: str) -> None:
    """Hold a slot's credits against the rest of its header, which is all that the cut sees."""
    if not slot.credits:
        return
    if slot.status is not SlotStatus.SCORED:
        raise WireError(f"{what}: got credits on a slot that is {slot.status}, need a scored one")
    num_tokens = sum(credit.num_tokens for credit in slot.credits)
    if num_tokens > slot.num_output_tokens:
        raise WireError(
            f"{what}: got credits for {num_tokens} tokens, need at most the {slot.num_output_tokens} sampled"
        )
    if slot.reward != mean([credit.reward for credit in slot.credits]):
        raise WireError(f"{what}: got a reward of {slot.reward:g}, which is not the mean of its credits")


def split_message(payload: bytes) -> list[memoryview]:
    """Return the payloads of a message's slots, uncopied and unverified.

    Raises:
        WireError: it is no message of trajectories.
    """
    try:
        return msgspec.msgpack.decode(payload, type=list[memoryview])
    except _MALFORMED as exc:
        raise WireError(f"trajectory message: cannot decode {len(payload)} bytes: {exc}") from exc


def decode_trajectory(payload: bytes, slot: Slot) -> Trajectory:
    """Read one slot's trajectory out of its message, as ``decode_slot`` does."""
    return decode_slot(split_message(payload), slot)


def decode_slot(blobs: Seq[memoryview], slot: Slot) -> Trajectory:
    """Read one slot's trajectory out of the payloads of its message, verified by checksum, sibling and id.

    Raises:
        WireError: anything in the payload disagrees with the slot's header or with itself.
    """
    what = f"trajectory {slot.sample_uid}"
    try:
        blob = blobs[slot.index]
        if zlib.crc32(blob) != slot.crc32:
            raise WireError(f"{what}: got checksum {zlib.crc32(blob)}, need {slot.crc32}; the stored bytes are damaged")
        body = msgspec.msgpack.decode(blob, type=_SlotPayload)
    except (*_MALFORMED, IndexError) as exc:
        raise WireError(f"{what}: cannot decode payload {slot.index} of {len(blobs)}: {exc}") from exc
    if (body.schema, body.sibling, body.sample_uid) != (SCHEMA, slot.sibling, slot.sample_uid):
        raise WireError(f"{what}: got the payload of {body.sample_uid}, schema {body.schema}")
    if len(body.sequences) > MAX_SEQUENCES:
        raise WireError(f"{what}: got {len(body.sequences)} sequences, need at most {MAX_SEQUENCES}")
    if not all(math.isfinite(value) for value in body.info.values()):
        raise WireError(f"{what}: got info with a value that is no finite number")
    if (_TURNS in body.extensions) != bool(slot.credits):
        raise WireError(
            f"{what}: got no turns, need them for the credits that its header has"
            if slot.credits
            else f"{what}: got turns, but its header has no credits"
        )
    turns: list[bytes | None] = _extension(body, _TURNS, bytes, None, what)
    temperatures, steered = (_extension(body, name, _Runs, [], what) for name in (_TEMPERATURES, _STEERED))
    images = _extension(body, _IMAGES, list[_ImagePayload], [], what)
    columns = zip(body.sequences, turns, temperatures, steered, images, strict=True)
    sequences = [_sequence(*column, what) for column in columns]
    for sequence in sequences:
        _check_values(sequence, slot, what)
    _check_images(sequences, what)
    if slot.credits:
        _check_turns(sequences, slot, what)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    if num_tokens != slot.num_tokens:
        raise WireError(f"{what}: got {num_tokens} tokens, its header says {slot.num_tokens}")
    return Trajectory(slot=slot, sequences=sequences, info=body.info)


def _extension(body: _SlotPayload, name: str, kind: Any, absent: Any, what: str) -> list[Any]:
    """Return what an extension has for each sequence, one of a ``kind``; ``absent`` where the slot is without it."""
    if name not in body.extensions:
        return [absent] * len(body.sequences)
    try:
        values = msgspec.msgpack.decode(body.extensions[name], type=list[kind])
    except _MALFORMED as exc:
        raise WireError(f"{what}: cannot decode {name}: {exc}") from exc
    if len(values) != len(body.sequences):
        raise WireError(f"{what}: got {name} for {len(values)} sequences, need {len(body.sequences)}")
    return values


def _sequence(
    item: _SequencePayload,
    turns: bytes | None,
    temperatures: _Runs,
    steered: _Runs,
    images: list[_ImagePayload],
    what: str,
) -> Sequence:
    if not 0 < item.num_tokens <= MAX_TOKENS:
        raise WireError(f"{what}: got {item.num_tokens} tokens, need 1 to {MAX_TOKENS}")
    columns: dict[str, Any] = {}
    buffers = [(name, dtype, getattr(item, name)) for name, dtype in _COLUMNS]
    if turns is not None:
        buffers.append((_TURNS, _TURNS_DTYPE, turns))
    for name, dtype, buffer in buffers:
        need = item.num_tokens * dtype.itemsize
        if len(buffer) != need:
            raise WireError(f"{what}: {name} got {len(buffer)} bytes, need {need}")
        columns[name] = np.frombuffer(buffer, dtype=dtype)
    steered_L = _laid_out(steered, _STEERED, item.num_tokens, 1.0, what)
    return Sequence(
        **columns,
        temperatures=_laid_out(temperatures, _TEMPERATURES, item.num_tokens, MAX_TEMPERATURE, what),
        steered=None if steered_L is None else steered_L != 0,
        images=_image_refs(images, item.num_tokens, what),
    )


def _image_refs(images: list[_ImagePayload], num_tokens: int, what: str) -> list[ImageRef] | None:
    """Return the images of a sequence, of which each has a token at the least; None where it has none."""
    if len(images) > min(MAX_IMAGES, num_tokens):
        raise WireError(
            f"{what}: got {len(images)} images for {num_tokens} tokens, need at most one each, and {MAX_IMAGES}"
        )
    refs = [
        ImageRef(sha256=one.digest.hex(), num_bytes=one.num_bytes, width=one.width, height=one.height) for one in images
    ]
    return refs or None


def _check_images(sequences: Seq[Sequence], what: str) -> None:
    """Hold against each other what is said of one image: its file is read once, for all that name it."""
    by_hash: dict[str, ImageRef] = {}
    for ref in (ref for sequence in sequences for ref in sequence.images or ()):
        if (first := by_hash.setdefault(ref.sha256, ref)) != ref:
            raise WireError(
                f"{what}: got the image {ref.sha256} of {ref.width} x {ref.height} pixels in {ref.num_bytes} bytes, "
                f"and of {first.width} x {first.height} in {first.num_bytes}, need one size"
            )


def _laid_out(runs: _Runs, name: str, num_tokens: int, most: float, what: str) -> NDArray[np.float32] | None:
    """Return what each token has; None where it is not known."""
    if not runs:
        return None
    counts = [count for count, _ in runs]
    if min(counts) < 1 or sum(counts) != num_tokens:
        raise WireError(f"{what}: got {name} for {sum(counts)} tokens, need them for {num_tokens}, each once")
    if not all(0 <= value <= most for _, value in runs):
        raise WireError(f"{what}: got {name} outside of 0 to {most:g}")
    return np.repeat(np.array([value for _, value in runs], dtype=np.float32), counts)


@functools.lru_cache(maxsize=1024)
def _pack(version: str) -> int:
    return Version.parse(version).pack()


def _check_values(sequence: Sequence, slot: Slot, what: str) -> None:
    """Hold the tokens against what the cut was told of them: a header must not make a stale token look fresh."""
    if sequence.token_ids.min() < 0:
        raise WireError(f"{what}: got the token id {sequence.token_ids.min()}, need 0 or more")
    mask_byte = sequence.loss_mask.view(np.uint8).max()
    if mask_byte > 1:
        raise WireError(f"{what}: loss_mask got a byte of {mask_byte}, need 0 or 1")
    if not np.isfinite(sequence.logprobs).all():
        raise WireError(f"{what}: got a logprob that is no finite number")
    sampled = sequence.versions[sequence.loss_mask]
    if np.count_nonzero(sequence.versions != NOT_SAMPLED) > np.count_nonzero(sampled != NOT_SAMPLED):
        raise WireError(f"{what}: got a version on a token that was not sampled")
    if sampled.size and (sampled.min() < _pack(slot.oldest) or sampled.max() > _pack(slot.newest)):
        raise WireError(f"{what}: got tokens of versions outside {slot.oldest} to {slot.newest}, which its header says")


def _check_turns(sequences: Seq[Sequence], slot: Slot, what: str) -> None:
    """Hold the tokens against the credits that the cut was told of: each has its own, all of them and no other."""
    counts = np.zeros(len(slot.credits), dtype=np.int64)
    for sequence in sequences:
        turns = sequence.turns
        assert turns is not None
        if turns.min() < NOT_CREDITED or turns.max() >= len(slot.credits):
            raise WireError(
                f"{what}: got turns from {turns.min()} to {turns.max()}, its header has {len(slot.credits)} credits"
            )
        if (turns[~sequence.loss_mask] != NOT_CREDITED).any():
            raise WireError(f"{what}: got a credit on a token that was not sampled")
        counts += np.bincount(turns[turns != NOT_CREDITED], minlength=len(slot.credits))
    if counts.tolist() != [credit.num_tokens for credit in slot.credits]:
        raise WireError(f"{what}: got other numbers of tokens in its turns than its header has in its credits")


def _ascii_json(value: Any) -> str:
    """Encode for a header: header values must hold no line break and no byte beyond ASCII."""
    try:
        return msgspec.json.encode(value).decode("ascii")
    except UnicodeError:  # more than ASCII, or surrogates that stand for what is no UTF-8
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), ensure_ascii=True)
