"""Rows, and what a model says of them, between ranks that divide that model otherwise than the policy.

The policy's layout decides which rank holds which rows. A model of another layout has other ranks that hold the same
rows, so its calls begin with everyone's rows on every rank, of which each takes its own, and end with everyone's
results. Bytes over a control group of its own; nothing is pickled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.trainer.engine.parallel.dims import PP, TP, ParallelDims
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import Parts, balance
from areal_async.trainer.packing.rows import TrainRow

RowInference = Callable[[Sequence[TrainRow]], list[Tensor]]
"""A call of a model's engine: a number for every token of each row [L]."""
DTYPES = ("|b1", "<i2", "<i4", "<i8", "<f4")
"""Types of the arrays that travel; the place of each is the code of its bytes."""


class _Parcel(msgspec.Struct, array_like=True):
    """What must be known of a row to decide who takes it, and the row."""

    index: int
    num_tokens: int
    num_scored: int
    row: msgspec.Raw


_PARCELS = msgspec.msgpack.Decoder(list[_Parcel])


class Resharder:
    """The way between the ranks that hold rows for the policy and those that hold them for another model."""

    def __init__(
        self, *, source: ParallelDims, target: ParallelDims, flops: DecoderFlops, num_minibatches: int = 1
    ) -> None:
        """Lead from the policy's layout to another one of the same ranks. A collective.

        Args:
            flops: the other model's operations, by which its ranks share the rows.
            num_minibatches: each of which they share by itself.
        """
        self._source = source
        self._target = target
        self._flops = flops
        self._num_minibatches = num_minibatches
        # A group of its own, for the calls of several models run side by side.
        self._ranks = source.all.with_control_group()

    def take(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """Return the rows of the target's rank for those of the source's. A collective."""
        parcels = [parcel for part in self._gather(rows) for parcel in part]
        return [_unpacked(parcels[place]) for place in self._divide(parcels)[self._target.data.rank]]

    def infer(self, rows: Sequence[TrainRow], infer: RowInference) -> list[Tensor]:
        """Return for each row of the source's rank what the target's model says of it. A collective."""
        by_source = self._gather(rows)
        parcels = [parcel for part in by_source for parcel in part]
        shares = self._divide(parcels)
        answers = infer([_unpacked(parcels[place]) for place in shares[self._target.data.rank]])
        own = b"".join(answer.float().numpy().tobytes() for answer in answers)
        payloads = self._ranks.gather_bytes(own if self._target.is_reporting_rank else b"")
        results: dict[int, Tensor] = {}
        for share, rank in zip(shares, self._target.reporting_ranks, strict=True):
            ends = np.cumsum([parcels[place].num_tokens for place in share])
            pieces = np.split(np.frombuffer(payloads[rank], dtype="<f4").copy(), ends[:-1])
            results |= {place: torch.from_numpy(piece) for place, piece in zip(share, pieces, strict=False)}
        first = sum(len(part) for part in by_source[: self._source.data.rank])
        return [results[place] for place in range(first, first + len(rows))]

    def _gather(self, rows: Sequence[TrainRow]) -> list[list[_Parcel]]:
        """Return the rows of each of the source's data ranks."""
        payloads = self._ranks.gather_bytes(encode_rows(rows) if self._source.is_reporting_rank else b"")
        return [_PARCELS.decode(payloads[rank]) for rank in self._source.reporting_ranks]

    def _divide(self, parcels: Sequence[_Parcel]) -> Parts:
        """Return which rows each of the target's data ranks takes; those of one trajectory stay together."""
        shares: Parts = [[] for _ in range(self._target.data.size)]
        for turn in range(self._num_minibatches):
            members: dict[int, list[int]] = {}
            for place, parcel in enumerate(parcels):
                if parcel.index % self._num_minibatches == turn:
                    members.setdefault(parcel.index, []).append(place)
            whole = list(members.values())
            costs = [
                sum(self._flops.forward(parcels[place].num_tokens, parcels[place].num_scored) for place in places)
                for places in whole
            ]
            for share, taken in zip(shares, balance(costs, num_ranks=len(shares)), strict=True):
                share += [place for number in taken for place in whole[number]]
        return [sorted(share) for share in shares]


def hold_same_rows(dims: ParallelDims, other: ParallelDims) -> bool:
    """Return whether every rank holds the same rows in both, so that none need travel."""
    return all(dims.sizes[one] == other.sizes[one] for one in (PP, TP))


def encode_rows(rows: Sequence[TrainRow]) -> bytes:
    """Return the rows as bytes, which travel between ranks and which tools keep a batch in."""
    encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
    parcels = [
        _Parcel(one.index, one.num_tokens, int(one.loss_mask.sum()), msgspec.Raw(encoder.encode(one))) for one in rows
    ]
    return encoder.encode(parcels)


def decode_rows(payload: bytes) -> list[TrainRow]:
    """Return the rows that ``encode_rows`` was given.

    Raises:
        msgspec.MsgspecError: these are no such bytes.
    """
    return [_unpacked(parcel) for parcel in _PARCELS.decode(payload)]


def _unpacked(parcel: _Parcel) -> TrainRow:
    columns = msgspec.msgpack.decode(parcel.row, ext_hook=_array)
    return TrainRow(**columns | {"images": tuple(columns.get("images", ()))})  # a batch that was kept may have none


def _encoded(values: Any) -> Any:
    """Return an array as bytes of one of ``DTYPES``, and a number of numpy's as Python's."""
    array = np.asarray(values)
    if not array.ndim:
        return array.item()
    array = array.astype("<f4") if array.dtype.kind == "f" else array
    return msgspec.msgpack.Ext(DTYPES.index(array.dtype.str), array.tobytes())


def _array(code: int, payload: memoryview) -> NDArray[Any]:
    # A copy: the bytes' own memory cannot be written to, which torch warns of.
    return np.frombuffer(payload, dtype=DTYPES[code]).copy()
