"""Causal attention over a packed row, one document at a time.

A packed row has no mask: a block-diagonal one would cost as much as the padding that packing saves. Documents are
told apart by their lengths instead, which the model passes down to every layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED = "areal_packed"
SIMILAR_TOKENS = 16
"""Documents whose lengths differ by less are attended in one call: for a short one the call costs more than the work,
and for a long one so few tokens more are little."""


def register_packed_attention() -> None:
    """Make ``PACKED`` an attention implementation that transformers' models can be loaded with.

    No mask function goes with it, so the models build none.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def attention_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return flash attention's varlen kernel where it can run, else ``PACKED``."""
    has_flash = device.type == "cuda" and dtype == torch.bfloat16 and find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else PACKED


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Documents:
    """A row's documents as batches for attention: those of similar length together, filled up to their longest.

    What fills up stands behind its document and repeats its last token: causal attention never looks there, and
    nothing that is attended there is kept. T: tokens of the row; P: places in the batches.
    """

    batches: list[tuple[int, int]]
    """Number of documents and length of each batch."""
    taken_P: Tensor
    """Position in the row of what stands in each place."""
    kept_T: Tensor
    """Place of each token of the row."""
    spare: Tensor
    """Places that only fill up."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Lay out documents of these lengths."""
        order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
        starts = np.cumsum([0, *lengths])[:-1]
        batches: list[list[int]] = []
        for document in order:
            if batches and lengths[batches[-1][0]] - lengths[document] < SIMILAR_TOKENS:
                batches[-1].append(document)
            else:
                batches.append([document])
        taken, is_kept = [], []
        for batch in batches:
            place_L = np.arange(lengths[batch[0]])
            own_N1 = np.array([lengths[document] for document in batch])[:, None]
            taken.append((starts[batch][:, None] + np.minimum(place_L, own_N1 - 1)).ravel())
            is_kept.append((place_L < own_N1).ravel())
        taken_P, is_kept_P = np.concatenate(taken), np.concatenate(is_kept)
        kept_T = np.empty(sum(lengths), dtype=np.int64)
        kept_T[taken_P[is_kept_P]] = np.flatnonzero(is_kept_P)
        return cls(
            batches=[(len(batch), lengths[batch[0]]) for batch in batches],
            taken_P=torch.from_numpy(taken_P).to(device),
            kept_T=torch.from_numpy(kept_T).to(device),
            spare=torch.from_numpy(np.flatnonzero(~is_kept_P)).to(device),
            longest=max(lengths),
        )


class _ScatterToBatches(torch.autograd.Function):
    """Values of a row [T, ...] to the places of its batches [P, ...].

    Both directions are a plain selection: no gradient comes from a place that only fills up.
    """

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return values_T.index_select(0, documents.taken_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.documents.kept_T), None


class _Collect(torch.autograd.Function):
    """Values of the batches' places [P, ...] back to the row [T, ...]."""

    @staticmethod
    def forward(ctx: Any, values_P: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return values_P.index_select(0, documents.kept_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        places_P = gradients[0].index_select(0, ctx.documents.taken_P)
        return places_P.index_fill_(0, ctx.documents.spare, 0.0), None


# torch does not type its own ``apply``
_spread: Callable[[Tensor, Documents], Tensor] = _ScatterToBatches.apply
_collect: Callable[[Tensor, Documents], Tensor] = _Collect.apply


def document_arguments(lengths: list[int], implementation: str, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments that tell the model's attention where documents end."""
    if implementation == PACKED:
        return {"documents": Documents.of(lengths, device)}
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of one packed row.

    Shapes: query [1, H, T, D], key and value [1, K, T, D] with K dividing H; returns [1, T, H, D].

    Raises:
        ValueError: a mask, or a document longer than the model's sliding window, neither of which is done here.
    """
    if attention_mask is not None:
        raise ValueError("packed attention: got a mask, need none; documents are told apart by their lengths")
    if sliding_window is not None and documents.longest > sliding_window:
        raise ValueError(
            f"packed attention: got a sequence of {documents.longest} tokens, "
            f"need at most the model's sliding window of {sliding_window}; shorten rollout.sampling.max_new_tokens"
        )
    repeats = query.shape[1] // key.shape[1]
    # The kernels of a CPU read shared heads in place; not all of a GPU's do.
    in_place = repeats > 1 and query.device.type == "cpu"
    if repeats > 1 and not in_place:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    sizes = [count * length for count, length in documents.batches]
    places = [_spread(part[0].transpose(0, 1), documents).split(sizes) for part in (query, key, value)]
    outputs = []
    for (count, length), *parts in zip(documents.batches, *places, strict=True):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=in_place
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return _collect(torch.cat(outputs), documents)[None], None
