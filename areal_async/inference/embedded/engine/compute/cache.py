"""The batched key-value cache, and the attention that reads it.

Letters: S slots, L positions, H key-value heads, Q query heads, D head size, T tokens of this forward pass, N running
sequences.

Every running sequence owns one slot; sequence i of the batch sits in slot i, so a decoding step attends to *views* of
neighbouring slots and first L positions (``bands.py``) and nothing is copied when sequences join. When one leaves, it
and the last slot are exchanged; so are slots whose sequence belongs to another view.

Invariant: positions at or past a sequence's length hold finite numbers (zeros or leftovers), so a masked position
contributes exactly nothing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.compute.bands import Band
from areal_async.inference.embedded.engine.compute.held import HeldTokens

_POSITION_BLOCK = 16
"""Attended lengths are rounded up to this, so that shapes repeat."""


class Segment(NamedTuple):
    """One prompt among those packed into a pass."""

    start: int
    """First of its tokens in the pass; ``end`` is past the last."""
    end: int
    slot: int
    cached: int = 0
    """Positions of its slot, from the first, that are computed already: its tokens come after them."""


@dataclass(slots=True)
class ForwardPlan:
    """Where one forward pass writes its keys and values, and what each query may see."""

    slots_T: torch.Tensor
    """Slot of every token of the pass."""
    positions_T: torch.Tensor
    """Position of every token in its slot."""
    segments: list[Segment] | None = None
    """Prefill: the packed prompts. None for a decoding step, of one token for each of the first slots."""
    bands: Sequence[Band] = ()
    """Decoding: the views, of L positions each."""
    _masks: dict[tuple[int | None, torch.dtype], list[torch.Tensor]] = field(default_factory=dict)
    _rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def extends(self) -> bool:
        """Whether a prompt of the pass sees positions that an earlier pass computed."""
        return self.segments is not None and any(segment.cached for segment in self.segments)

    def laid_out(self, states_THD: torch.Tensor) -> torch.Tensor:
        """Return the view that transformers' attention has: [1, H, T, D] of packed prompts, [N, H, 1, D] of a step."""
        return states_THD[:, :, None] if self.segments is None else states_THD.transpose(0, 1)[None]

    def rows(self, num_heads: int, slot_tokens: int) -> torch.Tensor:
        """Return the rows [T * H] of a flat cache that the tokens are written to, built once per pass and shape."""
        rows = self._rows.get((num_heads, slot_tokens))
        if rows is None:
            heads_H = torch.arange(num_heads, device=self.slots_T.device)
            heads_TH = self.slots_T[:, None] * num_heads + heads_H
            rows = (heads_TH * slot_tokens + self.positions_T[:, None]).flatten()
            self._rows[num_heads, slot_tokens] = rows
        return rows

    @property
    def slots(self) -> list[slice]:
        """Slots of each band."""
        return [slice(*ends) for ends in pairwise([0, *(band.end for band in self.bands)])]

    def decode_masks(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each band's additive mask [n, 1, 1, L], built once per pass and kind of layer."""
        masks = self._masks.get((window, dtype))
        if masks is None:
            masks = [
                _decode_mask(self.positions_T[slots], band.num_positions, window, dtype)
                for slots, band in zip(self.slots, self.bands, strict=True)
            ]
            self._masks[window, dtype] = masks
        return masks


def _decode_mask(positions_N: torch.Tensor, num_seen: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    columns_L = torch.arange(num_seen, device=positions_N.device)
    is_hidden_NL = columns_L > positions_N[:, None]
    if window is not None:
        is_hidden_NL |= columns_L <= positions_N[:, None] - window
    mask = torch.zeros(is_hidden_NL.shape, dtype=dtype, device=is_hidden_NL.device)
    return mask.masked_fill_(is_hidden_NL, float("-inf"))[:, None, None, :]


class SlotLayer:
    """Keys and values of one layer: [S, H, L, D] each, so that what one head reads lies together."""

    def __init__(self, owner: "SlotCache") -> None:
        self._owner = owner
        self.store: list[torch.Tensor] = []
        """Tensors of keys, then of values; empty until the first forward pass gives their shapes."""

    def _allocate(self, num_heads: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
        shape = (self._owner.num_slots, num_heads, self._owner.slot_tokens, head_dim)
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # numpy's zeros are pages the system gives on first touch: slots that are never that long cost nothing.
        num_bytes = math.prod(shape) * like.element_size()
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(like.dtype).view(shape)

    def resize(self) -> None:
        """Take the owner's new size, keeping what fits."""
        for index, old in enumerate(self.store):
            new = self._allocate(old.shape[1], old.shape[3], old)
            slots, tokens = min(old.shape[0], new.shape[0]), min(old.shape[2], new.shape[2])
            new[:slots, :, :tokens] = old[:slots, :, :tokens]
            self.store[index] = new

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a pass has computed, laid out as its plan says; return what its queries attend to."""
        if not self.store:
            self.store = [self._allocate(new.shape[1], new.shape[3], new) for new in (key_states, value_states)]
        plan = self._owner.plan
        for cached, new in zip(self.store, (key_states, value_states), strict=True):
            _, num_heads, slot_tokens, head_dim = cached.shape
            rows = plan.rows(num_heads, slot_tokens)
            cached.view(-1, head_dim).index_copy_(0, rows, new.transpose(1, 2).reshape(-1, head_dim))
        keys, values = self.store
        if plan.segments is None:
            return keys[: key_states.shape[0]], values[: key_states.shape[0]]
        if not plan.extends:
            return key_states, value_states
        views = [(s.slot, slice(None), slice(0, s.cached + s.end - s.start)) for s in plan.segments]
        return tuple(torch.cat([store[view] for view in views], dim=1)[None] for store in self.store)  # type: ignore[return-value]


class SlotCache:
    """The cache of a whole model; ``plan`` must be set before each forward pass."""

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 1
        self.slot_tokens = _POSITION_BLOCK
        self.held = HeldTokens(self.num_slots, self.slot_tokens)
        self.plan = ForwardPlan(*torch.zeros(2, 0, dtype=torch.long))
        self.layers = [SlotLayer(self) for _ in range(num_layers)]

    @property
    def bytes_per_token(self) -> int:
        """What one position of one sequence costs over all layers; known after the first forward pass."""
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in self._tensors())

    def resize(self, num_slots: int, slot_tokens: int) -> None:
        """Reallocate for ``num_slots`` sequences of ``slot_tokens``; what fits is kept."""
        self.num_slots, self.slot_tokens = num_slots, slot_tokens
        self.held = self.held.resized(num_slots, slot_tokens)
        for layer in self.layers:
            layer.resize()

    def clear(self) -> None:
        """Start empty: what a broken model wrote (NaN) must not outlive its weights, nor memory its need."""
        self.num_slots, self.slot_tokens = 1, _POSITION_BLOCK
        self.held = HeldTokens(self.num_slots, self.slot_tokens)
        for layer in self.layers:
            layer.store = []

    def clear_slot(self, slot: int) -> None:
        """Zero one slot."""
        for tensor in self._tensors():
            tensor[slot].zero_()
        self.held.put(slot, [])

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of one slot to another."""
        for tensor in self._tensors():
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]
        self.held.copy(source, target, num_tokens)

    def exchange_slots(self, one: int, other: int, num_tokens: int) -> None:
        """Exchange the first ``num_tokens`` positions of two slots; neither holds more."""
        for tensor in self._tensors():
            first, second = tensor[one, :, :num_tokens], tensor[other, :, :num_tokens]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        self.held.exchange(one, other)

    def attended_tokens(self, longest: int) -> int:
        """Return the length of the view that holds ``longest`` positions."""
        return min(self.slot_tokens, -(-longest // _POSITION_BLOCK) * _POSITION_BLOCK)

    def _tensors(self) -> Iterable[torch.Tensor]:
        return (tensor for layer in self.layers for tensor in layer.store)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slot_plan: ForwardPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the plan says, with the signature that transformers has for an attention.

    Args:
        query: [1, Q, T, D] for packed prompts, [N, Q, 1, D] for a decoding step.

    Returns:
        The output with tokens before heads, as transformers expects, and no attention weights.

    Raises:
        UserError: the model's attention is of a kind that is not computed here; it shows at the first pass.
    """
    if slot_plan is None or softcap is not None or s_aux is not None:
        wants = "soft-capping" if softcap is not None else "sinks" if s_aux is not None else "to be called its own way"
        raise UserError(
            f"model: got {type(module).__name__}, which wants {wants}, need plain attention as of Qwen2, Qwen3 or "
            "Llama; use SGLang for this model"
        )
    if slot_plan.segments is not None:
        outputs, key_end = [], 0
        for start, end, _, cached in slot_plan.segments:
            key_start, key_end = key_end, key_end + cached + end - start
            seen = (key[:, :, key_start:key_end], value[:, :, key_start:key_end])
            outputs.append(_attend_prompt(query[:, :, start:end], *seen, scaling, sliding_window))
        return torch.cat(outputs, dim=2).transpose(1, 2), None
    # The query heads that share a key head become its queries: no repeated keys, one mask for all.
    num_rows, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    masks = slot_plan.decode_masks(sliding_window, query.dtype)
    outputs = [
        F.scaled_dot_product_attention(
            grouped[slots],
            key[slots, :, : band.num_positions],
            value[slots, :, : band.num_positions],
            attn_mask=mask,
            scale=scaling,
        )
        for slots, band, mask in zip(slot_plan.slots, slot_plan.bands, masks, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None


def _attend_prompt(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    length, num_seen = query.shape[2], key.shape[2]
    mask = None
    if num_seen > length or (window is not None and length > window):
        ones = torch.ones(length, num_seen, dtype=torch.bool, device=query.device)
        mask = ones.tril(num_seen - length)
        if window is not None:
            mask &= ~ones.tril_(num_seen - length - window)
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )
