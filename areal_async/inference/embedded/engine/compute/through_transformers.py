"""Models of every other kind: transformers loads and computes them, over the same slots.

Imported only for them: it is half of what a server imports.

Letters: H key-value heads, T tokens of this pass, D head size, N running sequences.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.compute.cache import SlotCache, SlotLayer, attend

_NAME = "areal_async_slots"
_SEEING = {"text_config": _NAME, "vision_config": "sdpa"}
"""By part of a model that sees: within an image nothing is causal, and nothing is cached."""
# No mask function is registered under this name, so transformers builds no mask: the plan has it.
AttentionInterface.register(_NAME, attend)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of slots where transformers wants a layer of its own cache."""

    is_sliding = False

    def __init__(self, slots: SlotLayer) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is to be done for it: the slots are."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._slots.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def as_past(cache: SlotCache) -> Any:
    """Return the slots as what transformers calls ``past_key_values``: [1, H, T, D] of a prefill, [N, H, 1, D] else."""
    return Cache(layers=[_Layer(slots) for slots in cache.layers])


def load_model(path: Path, *, sees: bool, dtype: torch.dtype | str) -> Any:
    """Return the model in folder ``path``, on the CPU.

    Raises:
        UserError: tensors are missing or of the wrong shape.
    """
    factory, attention = (AutoModelForImageTextToText, _SEEING) if sees else (AutoModelForCausalLM, _NAME)
    return _load(factory, path, dtype, attention, remedy="check --model-path")


def load_scorer(path: Path, *, dtype: torch.dtype | str) -> Any:
    """Return the sequence classifier in folder ``path``, on the CPU.

    Raises:
        UserError: as ``load_model``; or it has no head of its own.
    """
    remedy = "need a sequence classifier with its head, as reward-model writes one"
    model = _load(AutoModelForSequenceClassification, path, dtype, _NAME, remedy=remedy)
    if not hasattr(model, "score"):
        raise UserError(
            f"model at {path}: got a classifier of type {model.config.model_type} without a head named score, need "
            "a decoder such as Qwen2, Qwen3 or Llama"
        )
    return model


def _load(
    factory: Any, path: Path, dtype: torch.dtype | str, attention: str | Mapping[str, str], *, remedy: str
) -> Any:
    model, loading = factory.from_pretrained(path, dtype=dtype, attn_implementation=attention, output_loading_info=True)
    if loading["missing_keys"] or loading["mismatched_keys"]:
        raise UserError(
            f"model at {path}: {len(loading['missing_keys'])} tensors missing and "
            f"{len(loading['mismatched_keys'])} of the wrong shape; {remedy}"
        )
    return model
