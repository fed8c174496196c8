"""Rows of tokens with images: one placeholder for each image, or one for each of its tokens, and their positions.

A row is *collapsed* when each image has one placeholder, as chat templates write and servers take it, and *expanded*
when it has as many as the image has tokens. Every length that is counted, stored or trained is the expanded one. L:
tokens of an expanded row.

Invariant: ``collapse`` undoes ``expand``, and positions are those of transformers' ``get_rope_index``. Placeholders
stand between the two marks of their image and nowhere else: a row where a model has sampled one is refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_async.vision.spec import Grid, VisionSpec


def expand(ids: Sequence[int], grids: Sequence[Grid], spec: VisionSpec) -> list[int]:
    """Give each image of a collapsed row as many placeholders as it has tokens.

    Args:
        grids: of its images, in their order.

    Raises:
        ValueError: there are more or fewer images than grids, one has several placeholders, or a mark is missing.
    """
    row = np.asarray(ids, dtype=np.int64)
    starts, ends = _images(row, spec)
    _check_count(len(starts), grids)
    if (long := ends - starts > 1).any():
        at = int(starts[long.argmax()])
        raise ValueError(
            f"row: got {int(ends[long.argmax()]) - at} placeholders for the image at token {at}, need one; collapse it"
        )
    repeats = np.ones(len(row), dtype=np.int64)
    repeats[starts] = [spec.num_tokens(grid) for grid in grids]
    expanded: list[int] = np.repeat(row, repeats).tolist()
    return expanded


def collapse(ids: Sequence[int], spec: VisionSpec) -> list[int]:
    """Leave each image of a row one placeholder; its images are then as many as its placeholders.

    Raises:
        ValueError: a mark is missing.
    """
    row = np.asarray(ids, dtype=np.int64)
    starts, _ = _images(row, spec)
    is_kept = row != spec.image_token_id
    is_kept[starts] = True
    collapsed: list[int] = row[is_kept].tolist()
    return collapsed


def positions(ids: Sequence[int], grids: Sequence[Grid], spec: VisionSpec) -> tuple[NDArray[np.int64], int]:
    """Place the tokens of one expanded document in time, height and width.

    Text counts on in all three alike. An image stands still in time; its rows and columns count from where it starts,
    and the text behind it goes on after the longer of its sides.

    Args:
        grids: of its images, in their order.

    Returns:
        The positions [3, L], and what has to be added to the number of a later token to get its position.

    Raises:
        ValueError: there are more or fewer images than grids, one has another number of tokens, or a mark is missing.

    Source: multimodal rotary embedding (M-RoPE), Qwen2-VL, section 2.1.
    """
    row = np.asarray(ids, dtype=np.int64)
    starts, ends = check_grids(row, grids, spec)
    placed = np.empty((3, len(row)), dtype=np.int64)
    num_placed, position = 0, 0
    for start, end, grid in zip(starts.tolist(), ends.tolist(), grids, strict=True):
        placed[:, num_placed:start] = np.arange(position, position + start - num_placed)
        position += start - num_placed
        height, width = grid.h // spec.merge_size, grid.w // spec.merge_size
        placed[:, start:end] = position + np.indices((1, height, width)).reshape(3, -1)
        position += max(height, width)
        num_placed = end
    num_left = len(row) - num_placed
    placed[:, num_placed:] = np.arange(position, position + num_left)
    return placed, position + num_left - len(row)


def check_grids(
    ids: NDArray[np.integer[Any]], grids: Sequence[Grid], spec: VisionSpec
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the placeholders of each image of an expanded row start and end, both [images].

    Raises:
        ValueError: there are more or fewer images than grids, one has another number of tokens, or a mark is missing.
    """
    starts, ends = _images(ids, spec)
    _check_count(len(starts), grids)
    for start, end, grid in zip(starts.tolist(), ends.tolist(), grids, strict=True):
        if end - start != spec.num_tokens(grid):
            raise ValueError(
                f"row: got {end - start} placeholders for the image at token {start}, need {spec.num_tokens(grid)}; "
                "expand it"
            )
    return starts, ends


def _images(row: NDArray[np.integer[Any]], spec: VisionSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the placeholders of each image start and end, both [images]."""
    is_placeholder = row == spec.image_token_id
    edges = np.flatnonzero(np.diff(is_placeholder, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    # -1 is no token: a row that starts or ends with a placeholder lacks a mark
    marked = np.concatenate(([-1], row, [-1]))
    is_marked = (marked[starts] == spec.vision_start_token_id) & (marked[ends + 1] == spec.vision_end_token_id)
    if not is_marked.all():
        at = int(starts[is_marked.argmin()])
        raise ValueError(
            f"row: got a placeholder of images at token {at} without both marks around, need "
            f"{spec.vision_start_token_id} before and {spec.vision_end_token_id} after it"
        )
    return starts, ends


def _check_count(num_images: int, grids: Sequence[Grid]) -> None:
    if num_images != len(grids):
        raise ValueError(f"row: got {len(grids)} images, need {num_images}, one for each placeholder of its own")
