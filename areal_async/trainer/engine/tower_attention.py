"""Attention of a vision tower: within each image of a row, or each window of one, both ways and apart from all others.

Images are told apart by their lengths, which the host knows: nothing waits for a GPU to say them. transformers' own
implementations attend image by image, and window by window, with three such waits in each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from areal_async.trainer.engine import attention
from areal_async.trainer.engine.attention import Documents

WITHIN_IMAGES = "areal_flash_within_images"
"""A tower hands the bounds of images on to implementations that have flash in their name; for others it cuts its states
up itself."""


def register_tower_attention() -> None:
    """Make ``WITHIN_IMAGES`` an attention implementation that transformers' towers can be loaded with."""
    from transformers import AttentionInterface

    AttentionInterface.register(WITHIN_IMAGES, attend_within_images)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments(Documents):
    """What attends within itself, one after the other, each of its own number of patches. P: patches of them all."""

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Number of segments of a length, and that length, the shortest first."""
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return list(zip(counts.tolist(), lengths.tolist(), strict=True))

    @cached_property
    def order_P(self) -> Tensor:
        """Patches with those of equally long segments side by side."""
        segment_P = np.repeat(self.lengths, self.lengths)
        return torch.from_numpy(np.argsort(segment_P, kind="stable")).to(self.device)

    @cached_property
    def places_P(self) -> Tensor:
        """Where each patch stands in ``order_P``."""
        return self.order_P.argsort()


def segments_of(bounds: Tensor, device: torch.device) -> Segments:
    """Return the segments that begin and end at these bounds [N + 1], which are in host memory."""
    lengths: Sequence[int] = bounds.diff().tolist()
    return Segments(lengths=lengths, device=device)


def attend_within_images(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Segments,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each segment, in half precision on a GPU by flash attention's kernel, else those alike together.

    Shapes: query, key and value [1, H, P, D]; returns [1, P, H, D].

    Args:
        cu_seq_lens_q: what the tower was given as bounds.
    """
    segments = cu_seq_lens_q
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if attention.has_kernel(query, key, value):
        bounds, longest = segments.bounds, max(segments.lengths)
        attended_PHD = cast(Tensor, varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling))
    else:
        attended_PHD = _attend_alike((q, k, v), segments, scaling)
    return attended_PHD[None], None


def _attend_alike(parts_PHD: Sequence[Tensor], segments: Segments, scaling: float) -> Tensor:
    """Attend in one call within all segments of a length; returns [P, H, D]."""
    is_one = len(segments.sizes) == 1
    if not is_one:
        parts_PHD = [part.index_select(0, segments.order_P) for part in parts_PHD]
    split = [part.split([count * length for count, length in segments.sizes]) for part in parts_PHD]
    attended = []
    for (count, length), *own in zip(segments.sizes, *split, strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in own)
        attended.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    return attended[0] if is_one else torch.cat(attended).index_select(0, segments.places_P)
