"""What the tokens of packed rows show: the pixels of each image, once for all sequences of a row that show it.

Invariant: where one row of a call has images, all of them do: a row that shows nothing has a blank one, which no token
shows. So the model's tower runs in all rows, on all ranks, or in none.

Legend: T tokens of a row, I of them showing a part of an image each, N images.
"""

import functools
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.rows import PackedImages, PackedRow, TrainRow
from areal_async.vision.pixels import patches
from areal_async.vision.rows import positions
from areal_async.vision.spec import Grid, VisionSpec


class _Pixels(NamedTuple):
    """One image as a tower takes it."""

    patches: Tensor
    grid: Grid


def with_images(
    packed: Sequence[PackedRow], sequences: Sequence[Sequence[TrainRow]], spec: VisionSpec
) -> list[PackedRow]:
    """Return the packed rows with what their tokens show. Equal images are read once.

    Args:
        sequences: of each packed row, in their order; none of an empty one.

    Raises:
        ValueError: an image is none of this model's, or the tokens say that there are others.
    """

    read = functools.cache(functools.partial(_read, spec=spec))
    return [replace(row, images=_pack(row, own, read, spec)) for row, own in zip(packed, sequences, strict=True)]


def row_costs(rows: Sequence[TrainRow], flops: DecoderFlops, spec: VisionSpec | None) -> list[int]:
    """Return the operations of each row's forward pass, by which rows are divided.

    What an image costs is shared by those that show it, as if all shared a packed row.
    """
    own = [flops.forward(row.num_tokens, int(row.loss_mask.sum())) for row in rows]
    tower = flops.tower
    if tower is None or spec is None:
        return own
    shown = [set(row.images) for row in rows]
    count = Counter(png for images in shown for png in images)
    each = {png: tower.forward(_grid(png, spec)) // number for png, number in count.items()}
    return [cost + sum(each[png] for png in images) for cost, images in zip(own, shown, strict=True)]


def _grid(png: bytes, spec: VisionSpec) -> Grid:
    if len(png) < 24:
        raise ValueError("image: got bytes that are no whole PNG, need what was taken in")
    return spec.grid_of(*struct.unpack(">II", png[16:24]))  # width and height, in a PNG's first chunk


def _read(png: bytes, spec: VisionSpec) -> _Pixels:
    values = torch.from_numpy(patches(png, spec))
    return _Pixels(values, _grid(png, spec))


def _pack(row: PackedRow, own: Sequence[TrainRow], read: Callable[[bytes], _Pixels], spec: VisionSpec) -> PackedImages:
    """Return what a packed row of these sequences shows."""
    numbers: dict[bytes, int] = {}  # of each image among those of the row
    for png in (png for one in own for png in one.images):
        numbers.setdefault(png, len(numbers))
    images = [read(png) for png in numbers] or [_blank(spec)]
    starts = np.cumsum([0, *(spec.num_tokens(one.grid) for one in images)])
    order = [numbers[png] for one in own for png in one.images]
    shown = [np.arange(starts[number], starts[number + 1]) for number in order]
    is_shown = [one.token_ids == spec.image_token_id for one in own]
    counted_T = np.concatenate([np.arange(length) for length in row.lengths])
    placed = [positions(one.token_ids.tolist(), [read(png).grid for png in one.images], spec)[0] for one in own]
    # An empty row is text: its tokens count alike in time, height and width.
    placed_3T = np.concatenate(placed, axis=1) if own else np.stack([counted_T] * 3)
    device = row.token_ids_T.device
    return PackedImages(
        patches=[one.patches for one in images],
        grids_N3=torch.tensor([one.grid for one in images]),
        position_ids_4T=torch.from_numpy(np.concatenate([counted_T[None], placed_3T])).to(device),
        at_I=torch.from_numpy(np.flatnonzero(np.concatenate(is_shown or [[]]))).to(device),
        shown_I=torch.from_numpy(np.concatenate(shown or [np.arange(0)])).to(device),
    )


def _blank(spec: VisionSpec) -> _Pixels:
    """Return the smallest image there is, of the colour that normalization makes 0."""
    num_patches = spec.merge_size**2
    values = torch.zeros(num_patches, 3 * spec.temporal_patch_size * spec.patch_size**2)
    return _Pixels(values, Grid(1, spec.merge_size, spec.merge_size))
