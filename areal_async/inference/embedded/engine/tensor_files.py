"""Reading safetensors files, again and again.

The library's own reader leaves two numbers behind for every tensor that it reads (safetensors 0.8.0, with torch): a
server, which reads all of them at every step, would grow without bound.

Source of the format: https://github.com/huggingface/safetensors#format
"""

import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The library's own bound."""
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class _Place(msgspec.Struct):
    """Where a tensor is, in bytes after the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor [``shape`` of the file], each a view of the file: copy one to keep it.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is torn, or no such file.
    """
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants what it could write to
    length = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or start > len(mapped):
        raise ValueError(f"got {len(mapped)} bytes, need a header of {length}")
    try:
        header = msgspec.json.decode(mapped[_LENGTH_BYTES:start], type=dict[str, msgspec.Raw])
        places = {name: msgspec.json.decode(raw, type=_Place) for name, raw in header.items() if name != _METADATA}
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"header: {exc}") from exc
    data = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
    for name, place in places.items():
        yield name, _view(data, name, place)


def _view(data: torch.Tensor, name: str, place: _Place) -> torch.Tensor:
    dtype, (first, end) = _DTYPES.get(place.dtype), place.data_offsets
    if dtype is None:
        raise ValueError(f"{name}: got dtype {place.dtype:.20}, need one of {', '.join(_DTYPES)}")
    num_bytes = math.prod(place.shape) * dtype.itemsize
    if min(place.shape, default=0) < 0 or not 0 <= first <= end <= len(data) or end - first != num_bytes:
        raise ValueError(f"{name}: got bytes {first} to {end} of {len(data)}, need {num_bytes} for {place.shape}")
    if not num_bytes:
        return torch.empty(place.shape, dtype=dtype)
    part = data[first:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(place.shape)
