"""The layers of a plain decoder, computed from the model's own modules with as few operations as they need.

Of a decoding step of a small model a quarter or more is what transformers does around its layers, for every kind of
model there is. Here is the one kind that most are: normalized before attention and before a gated network, rotated
queries and keys. Others go through transformers.

The modules are read at every pass, so that swapped weights count from the next one on.

Letters: T tokens of this pass, E hidden size, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F

from areal_async.inference.embedded.engine.compute.cache import ForwardPlan, SlotCache, attend

_PLAIN_LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


def is_plain(model: Any) -> bool:
    """Whether ``PlainLayers`` computes what the model does."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return layers is not None and {type(layer).__name__ for layer in layers} <= _PLAIN_LAYERS


class PlainLayers:
    """A causal language model of plain layers over a slot cache."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, plan: ForwardPlan, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Feed the tokens of one pass; return the logits [len(kept), V], or [T, V] for None.

        Args:
            kept: indices of the tokens whose logits are wanted.
        """
        self._cache.plan = plan
        inner = self._model.model
        hidden_TE = inner.embed_tokens(ids_T)
        cos_1TD, sin_1TD = inner.rotary_emb(hidden_TE, positions_T[None])
        half = sin_1TD.shape[-1] // 2
        cos_T1D = cos_1TD[0, :, None]
        # The halves are exchanged, not negated, so the sine has the sign.
        sin_T1D = torch.cat((-sin_1TD[..., :half], sin_1TD[..., half:]), dim=-1)[0, :, None]
        for layer, slots in zip(inner.layers, self._cache.layers, strict=True):
            attention = layer.self_attn
            normed_TE = _normalize(layer.input_layernorm, hidden_TE)
            shape = (len(ids_T), -1, attention.head_dim)
            query = attention.q_proj(normed_TE).view(shape)
            key = attention.k_proj(normed_TE).view(shape)
            value = attention.v_proj(normed_TE).view(shape)
            if hasattr(attention, "q_norm"):
                query, key = _normalize(attention.q_norm, query), _normalize(attention.k_norm, key)
            query, key = (x * cos_T1D + x.roll(half, -1) * sin_T1D for x in (query, key))
            key, value = slots.update(plan.laid_out(key), plan.laid_out(value))
            mixed, _ = attend(
                attention,
                plan.laid_out(query),
                key,
                value,
                None,
                attention.scaling,
                getattr(attention, "sliding_window", None),
                slot_plan=plan,
            )
            hidden_TE = hidden_TE + attention.o_proj(mixed.reshape(len(ids_T), -1))
            hidden_TE = hidden_TE + layer.mlp(_normalize(layer.post_attention_layernorm, hidden_TE))
        if kept is not None:
            hidden_TE = hidden_TE[kept]
        logits: torch.Tensor = self._model.lm_head(_normalize(inner.norm, hidden_TE))
        return logits


def _normalize(norm: Any, x: torch.Tensor) -> torch.Tensor:
    # Rounded to the model's precision before the weight is applied, as transformers does.
    return F.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)
