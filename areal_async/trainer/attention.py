"""Causal attention over a packed row, one document at a time.

A packed row has no mask: a block-diagonal one would cost as much as the padding that packing saves. Documents are
told apart by their lengths instead, which the model passes down to every layer.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED = "areal_packed"


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


def document_arguments(lengths: list[int], implementation: str, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments that tell the model's attention where documents end."""
    if implementation == PACKED:
        return {"document_lengths": lengths}
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
    document_lengths: list[int],
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
    if sliding_window is not None and max(document_lengths) > sliding_window:
        raise ValueError(
            f"packed attention: got a sequence of {max(document_lengths)} tokens, "
            f"need at most the model's sliding window of {sliding_window}; shorten rollout.sampling.max_new_tokens"
        )
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    documents = zip(*(part.split(document_lengths, dim=2) for part in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
        for q, k, v in documents
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None
