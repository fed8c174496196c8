"""Causal attention over a packed row, one document at a time.

A packed row has no mask: a block-diagonal one would cost as much as the padding that packing saves. Documents are
told apart by their lengths instead, which the model passes down to every layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn

from areal_async.errors import UserError

PACKED = "areal_packed"
LAYER_KINDS = ("full_attention", "sliding_attention")
"""What transformers calls the layers that this attends for; any other kind would see its neighbours' tokens."""
UNSUPPORTED = {"softcap": "soft caps of its scores", "s_aux": "sinks", "position_bias": "biases", "alibi": "biases"}
"""What a model's attention may ask for by name, and what that is."""
HAS_KERNEL = {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys()
"""Whether this torch's flash attention over lengths has windows and shared heads; before 2.13 rows go in batches."""
SIMILAR_TOKENS = 16
"""Documents whose lengths differ by less are attended in one call: for a short one the call costs more than the work,
and for a long one so few tokens more are little."""


def register_packed_attention() -> None:
    """Make ``PACKED`` an attention implementation that transformers' models can be loaded with.

    No mask function goes with it, so the models build none.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def check_attention(config: Any, model: str) -> None:
    """Refuse a model whose configuration asks for more than causal attention, in full or in a window.

    Raises:
        UserError: the scores have a soft cap, or a layer is of another kind.
    """
    got = [f"layers of {kind}" for kind in getattr(config, "layer_types", None) or () if kind not in LAYER_KINDS]
    if getattr(config, "attn_logit_softcapping", None) is not None:
        got.append(f"attn_logit_softcapping={config.attn_logit_softcapping}")
    if got:
        raise UserError(
            f"model: got {model} of type {config.model_type} with {got[0]}, need plain causal attention, in full or in "
            "a sliding window; train a model such as Qwen2, Qwen3, Llama, Mistral or Gemma 3"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentBatches:
    """A row's documents as batches for attention: those of similar length together, filled up to their longest.

    What fills up stands behind its document and repeats its last token: causal attention never looks there, and
    nothing that is attended there is kept. T: tokens of the row; P: places in the batches.
    """

    shapes: list[tuple[int, int]]
    """Number of documents and length of each batch."""
    taken_P: Tensor
    """Position in the row of what stands in each place."""
    kept_T: Tensor
    """Place of each token of the row."""
    spare: Tensor
    """Places that only fill up."""

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
            shapes=[(len(batch), lengths[batch[0]]) for batch in batches],
            taken_P=torch.from_numpy(taken_P).to(device),
            kept_T=torch.from_numpy(kept_T).to(device),
            spare=torch.from_numpy(np.flatnonzero(~is_kept_P)).to(device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """The documents of a row, in the form that a layer's attention wants them; each form is made once a row."""

    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def bounds(self) -> Tensor:
        """Where documents begin, and the end of the last, [N + 1] in int32, as flash attention takes them."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)

    @cached_property
    def batches(self) -> DocumentBatches:
        """The documents as batches."""
        return DocumentBatches.of(self.lengths, self.device)


class _ScatterToBatches(torch.autograd.Function):
    """Values of a row [T, ...] to the places of its batches [P, ...].

    Both directions are a plain selection: no gradient comes from a place that only fills up.
    """

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, batches: DocumentBatches) -> Tensor:
        ctx.batches = batches
        return values_T.index_select(0, batches.taken_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.batches.kept_T), None


class _Collect(torch.autograd.Function):
    """Values of the batches' places [P, ...] back to the row [T, ...]."""

    @staticmethod
    def forward(ctx: Any, values_P: Tensor, batches: DocumentBatches) -> Tensor:
        ctx.batches = batches
        return values_P.index_select(0, batches.kept_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        places_P = gradients[0].index_select(0, ctx.batches.taken_P)
        return places_P.index_fill_(0, ctx.batches.spare, 0.0), None


# torch does not type its own ``apply``
_spread: Callable[[Tensor, DocumentBatches], Tensor] = _ScatterToBatches.apply
_collect: Callable[[Tensor, DocumentBatches], Tensor] = _Collect.apply


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of one packed row, in half precision on a GPU by flash attention's kernel.

    Never part of a compiled graph, which would be one for these lengths and this layer alone.

    Shapes: query [1, H, T, D], key and value [1, K, T, D] with K dividing H; returns [1, T, H, D].

    Args:
        sliding_window: how many tokens each one sees, itself among them; None shows it all before it.

    Raises:
        UserError: the model asks for what is not done here: a mask, a soft cap, sinks, a window that it does not pass.
    """
    _check_call(module, attention_mask, sliding_window, more)
    if has_kernel(query, key, value):
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        bounds, longest = documents.bounds, max(documents.lengths)
        # The kernel counts the tokens before the one that sees them.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        attended = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        attended_THD = cast(Tensor, attended)
    else:
        attended_THD = _attend_batches(query, key, value, documents.batches, scaling, sliding_window)
    return attended_THD[None], None


def _check_call(module: nn.Module, mask: Tensor | None, window: int | None, more: dict[str, Any]) -> None:
    got = [what for name, what in UNSUPPORTED.items() if more.get(name) is not None]
    if mask is not None:
        got.append("a mask")
    if getattr(module, "is_causal", True) is False:
        got.append("a look at what comes after")
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    is_sliding = kinds is not None and kinds[getattr(module, "layer_idx", 0)] == "sliding_attention"
    if is_sliding and window is None and getattr(config, "sliding_window", None) is not None:
        got.append("a window by a mask alone")
    if got:
        raise UserError(
            f"model: got attention with {got[0]} ({type(module).__name__}), need plain causal attention, in full or in "
            "a sliding window; train a model such as Qwen2, Qwen3, Llama, Mistral or Gemma 3"
        )


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether torch's flash attention takes these: a GPU, half precision, heads of one width that it knows."""
    return (
        HAS_KERNEL
        and query.is_cuda
        and query.shape[-1] % 8 == 0
        and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))
    )


def _attend_batches(
    query: Tensor, key: Tensor, value: Tensor, batches: DocumentBatches, scaling: float | None, window: int | None
) -> Tensor:
    """Attend batch by batch; returns [T, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    # The kernels of a CPU read shared heads in place; not all of a GPU's do.
    in_place = repeats > 1 and query.device.type == "cpu"
    if repeats > 1 and not in_place:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    sizes = [count * length for count, length in batches.shapes]
    places = [_spread(part[0].transpose(0, 1), batches).split(sizes) for part in (query, key, value)]
    outputs = []
    for (count, length), *parts in zip(batches.shapes, *places, strict=True):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        mask_LL = None
        if window is not None and length > window:
            place_L = torch.arange(length, device=query.device)
            ago_LL = place_L[:, None] - place_L
            mask_LL = (ago_LL >= 0) & (ago_LL < window)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling, enable_gqa=in_place
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return _collect(torch.cat(outputs), batches)
