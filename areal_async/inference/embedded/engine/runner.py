"""The model and its cache: what one forward pass costs, and nothing about who runs next.

Only the model thread calls ``prefill`` and ``decode``.
"""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.adapters import is_adapter
from areal_async.inference.embedded.engine.compute.bands import Band
from areal_async.inference.embedded.engine.compute.cache import ForwardPlan, Segment, SlotCache
from areal_async.inference.embedded.engine.compute.layers import PlainModel
from areal_async.inference.embedded.engine.errors import WeightsError, in_one_sentence
from areal_async.inference.embedded.engine.images import PromptImages, lay_out
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.tower import VisionTower
from areal_async.inference.embedded.engine.weights import Merged, StagedWeights, read_checkpoint, swap_weights
from areal_async.process.device import own_device
from areal_async.vision.spec import VisionSpec

_CPU_MEMORY_SHARE = 0.25
"""Share of the host's memory the cache may take: a trainer and other engines live there too."""
_CUDA_MEMORY_SHARE = 0.6
"""Share of the free device memory: growing the cache holds one layer twice, and activations need room."""
_CPU_PASS_TOKENS = 2048
"""Prompts are computed in passes of about this many tokens on a CPU: the activations of larger ones leave its caches,
which costs a third (6,600 tokens of the tiny model on one core: 0.40 s in one pass, 0.29 s in four)."""
MAX_SCORED_TOKENS = 8192
"""Tokens of prompts that are scored together, unless one prompt alone has more."""


class ModelRunner:
    """A causal language model with a slot cache."""

    def __init__(
        self, model: Any, *, context_length: int, max_total_tokens: int | None, vision: VisionSpec | None = None
    ) -> None:
        """Take a model on its device.

        Args:
            vision: how the model sees; None where it does not.
        """
        self.model = model
        self.vision = vision
        self.tower = None if vision is None else VisionTower(model)
        self.merged = Merged()
        """Adapter that is merged into the model's weights; replaced, never changed."""
        self.device: torch.device = model.device
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self._past = None if isinstance(model, PlainModel) else _as_past(self.cache)
        self.context_length = context_length
        with torch.inference_mode():
            self.prefill([[0]], [0])
        self.max_total_tokens = max_total_tokens or self._default_total_tokens(self.cache.bytes_per_token)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer, by the model's configurations."""
        configs = self.model.config.get_text_config(), getattr(self.model, "generation_config", None)
        ids = [getattr(config, "eos_token_id", None) for config in configs]
        return frozenset(id for one in ids for id in (one if isinstance(one, list) else [one]) if id is not None)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        images: Sequence[PromptImages | None] | None = None,
        cached: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute prompts into their slots; return the logits [len(prompts), V] after their last tokens.

        Args:
            prompts: expanded, with what was sampled after them, without what is cached.
            images: what each prompt shows; None for text alone.
            cached: positions of each slot that are computed already, and come before the prompt; 0 with images.
        """
        images = images or [None] * len(prompts)
        cached = cached or [0] * len(prompts)
        ends = list(accumulate(map(len, prompts)))
        if self.device.type != "cpu" or len(prompts) == 1 or ends[-1] <= _CPU_PASS_TOKENS:
            return self._prefill_pass(prompts, slots, images, cached)
        passes = groupby(range(len(prompts)), key=lambda index: ends[index] // _CPU_PASS_TOKENS)
        members = [list(indices) for _, indices in passes]
        parts = [slice(m[0], m[-1] + 1) for m in members]
        return torch.cat([self._prefill_pass(prompts[part], slots[part], images[part], cached[part]) for part in parts])

    def _prefill_pass(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        images: Sequence[PromptImages | None],
        cached: Sequence[int],
    ) -> torch.Tensor:
        """Compute prompts, packed into one sequence, in one forward pass."""
        ends = [0, *accumulate(map(len, prompts))]
        plan = ForwardPlan(
            slots_T=self._joined([slot] * len(prompt) for prompt, slot in zip(prompts, slots, strict=True)),
            positions_T=self._joined(
                range(first, first + len(prompt)) for prompt, first in zip(prompts, cached, strict=True)
            ),
            segments=[
                Segment(start, end, slot, first)
                for (start, end), slot, first in zip(pairwise(ends), slots, cached, strict=True)
            ],
        )
        ids_1T, last = self._joined(prompts)[None], self._joined([ends[1:]]) - 1
        if any(images):
            return self._forward_seeing(ids_1T, images, list(map(len, prompts)), plan, last)[0]
        return self._forward(ids_1T, plan.positions_T[None], plan, last)[0]

    def decode(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        bands: Sequence[Band],
        deltas_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed one token to each of the first N slots; return the logits [N, V] after it.

        Args:
            positions_N: how many tokens each sequence has before this one: where it is in its slot.
            bands: their slots, each with its highest position plus one, known on the host so that nothing waits for
                the device.
            deltas_N: what is added to ``positions_N`` where images stand before the token; None where none do.
        """
        plan = ForwardPlan(
            slots_T=torch.arange(len(ids_N), device=self.device),
            positions_T=positions_N,
            bands=[Band(band.end, self.cache.attended_tokens(band.num_positions)) for band in bands],
        )
        placed_N = positions_N if deltas_N is None else positions_N + deltas_N
        return self._forward(ids_N[:, None], placed_N[:, None], plan, None)[:, -1]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits of one pass, in the shape of ``ids``, of all its tokens or of those in ``kept``."""
        if self._past is None:
            logits: torch.Tensor = self.model(ids.flatten(), positions.flatten(), plan, self.cache, kept)
            return logits[None] if kept is not None else logits.view(*ids.shape, -1)
        self.cache.plan = plan
        output: torch.Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=0 if kept is None else kept,
            slot_plan=plan,
        ).logits
        return output

    def _forward_seeing(
        self,
        ids_1T: torch.Tensor,
        images: Sequence[PromptImages | None],
        lengths: Sequence[int],
        plan: ForwardPlan,
        logits_to_keep: torch.Tensor,
    ) -> torch.Tensor:
        assert self.tower is not None
        self.cache.plan = plan
        is_image_T, positions_3T = (torch.from_numpy(row).to(self.device) for row in lay_out(images, lengths))
        shown = [image for one in images if one is not None for image in one.images]
        # The model's own forward takes every token with the placeholder's id for an image, also one that was sampled.
        output = self.model.model.language_model(
            **self.tower.inputs(ids_1T, is_image_T, shown),
            position_ids=positions_3T[:, None],
            past_key_values=self._past,
            use_cache=True,
            slot_plan=plan,
        )
        logits: torch.Tensor = self.model.lm_head(output.last_hidden_state[:, logits_to_keep])
        return logits

    def swap_weights(self, staged: StagedWeights) -> None:
        """Point the model at other weights; what the tower saw by the old ones is forgotten."""
        self.merged = swap_weights(self.model, staged, self.merged)
        self.cache.held.clear()
        if self.tower is not None:
            self.tower.forget()

    def reserve(self, num_slots: int, slot_tokens: int, *, spare_slots: int = 0) -> None:
        """Make room for ``num_slots`` sequences of ``slot_tokens``, and where the budget allows for some more to keep.

        Sizes grow in powers of two while the budget allows, and then the whole budget is taken at once: growing copies.
        """
        affordable = self.max_total_tokens // max(self.cache.slot_tokens, slot_tokens)
        wanted = max(num_slots, min(num_slots + spare_slots, affordable))
        if wanted <= self.cache.num_slots and slot_tokens <= self.cache.slot_tokens:
            return
        slots = max(self.cache.num_slots, 1 << (wanted - 1).bit_length())
        tokens = max(self.cache.slot_tokens, 1 << (slot_tokens - 1).bit_length())
        if slots * tokens > self.max_total_tokens:
            tokens = slot_tokens
            slots = max(num_slots, min(slots, self.max_total_tokens // tokens))
        self.cache.resize(slots, tokens)

    def release_memory(self) -> None:
        """Give what the cleared cache has left with torch's allocator back to the device, for other processes."""
        if self.tower is not None:
            self.tower.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _joined(self, parts: Iterable[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long, device=self.device)

    def _default_total_tokens(self, bytes_per_token: int) -> int:
        if self.device.type == "cuda":
            free_bytes = int(torch.cuda.mem_get_info(self.device)[0] * _CUDA_MEMORY_SHARE)
        else:
            host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            free_bytes = int(host_bytes * _CPU_MEMORY_SHARE)
        return max(free_bytes // bytes_per_token, self.context_length)


class ScoringRunner(ModelRunner):
    """A sequence classifier: what SGLang serves with ``--is-embedding``. Nothing is kept between two passes."""

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return for each prompt what the head says at its last token: one number per label."""
        scores: list[list[float]] = self.prefill(prompts, [0] * len(prompts)).float().tolist()
        return scores

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan, kept: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, slot_plan=plan
        ).last_hidden_state
        scores: torch.Tensor = self.model.score(hidden[:, kept])
        return scores


def load_runner(options: EngineOptions, path: Path) -> ModelRunner:
    """Load the model in folder ``path`` as the options say, a ``ScoringRunner`` for one that scores; try one pass.

    Raises:
        UserError: the device or the model is unusable.
    """
    device = _resolve_device(options.device)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    with in_one_sentence(f"model at {path}"):
        vision = VisionSpec.read(path) if not options.is_embedding else None
        model = _load_model(options, path, device, sees=vision is not None)
        context_length = options.context_length or model.config.get_text_config().max_position_embeddings
        if options.is_embedding:
            return ScoringRunner(model, context_length=context_length, max_total_tokens=MAX_SCORED_TOKENS)
        return ModelRunner(
            model, context_length=context_length, max_total_tokens=options.max_total_tokens, vision=vision
        )


def _load_model(options: EngineOptions, path: Path, device: torch.device, *, sees: bool) -> Any:
    if not options.is_embedding and not sees:
        plain = read_plain_model(path, dtype=options.dtype, device=device)
        if plain is not None:
            return plain
    from areal_async.inference.embedded.engine.compute.through_transformers import load_model, load_scorer

    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model = load_scorer(path, dtype=dtype) if options.is_embedding else load_model(path, sees=sees, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def read_plain_model(path: Path, *, dtype: str, device: torch.device) -> PlainModel | None:
    """Return the model in folder ``path``; None where it is of another kind, or its files are not whole."""
    if is_adapter(path):  # transformers looks for the model that it is of
        return None
    try:
        return PlainModel.read(path, dict(read_checkpoint(path)), dtype=dtype, device=device)
    except WeightsError:
        return None


def _as_past(cache: SlotCache) -> Any:
    from areal_async.inference.embedded.engine.compute.through_transformers import as_past

    return as_past(cache)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return own_device()
    if re.fullmatch(r"(cpu|cuda)(:\d+)?", name) is None:
        raise UserError(f"device: got {name!r}, need auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: got {name}, but this machine has no usable CUDA device; pass --device cpu")
    return device
