"""What decoders and towers cost: floating-point operations, by which work is shared and utilisation measured."""

from dataclasses import dataclass
from typing import Any

from areal_async.vision.spec import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerFlops:
    """The operations of a forward pass of a vision tower, which attends within each image, both ways.

    Where the tower is trained the backward pass takes twice as many, as the decoder's does; a frozen one has none.
    """

    per_patch: int
    """Twice the weights of the blocks' matrices, and of what makes a patch a state."""
    per_token: int
    """Twice the weights of the mergers' matrices: they make a token of the states of several patches."""
    per_pair: int
    """4 x width x blocks that attend within whole images."""
    per_window_pair: int = 0
    """4 x width x blocks that attend within windows."""
    merge_size: int
    """Patches along the side of a token."""
    window: int = 0
    """Tokens along the side of a window."""

    def forward(self, grid: Grid) -> int:
        """Return the operations of one image."""
        num_patches = grid.h * grid.w
        operations = self.per_patch * num_patches + self.per_token * (num_patches // self.merge_size**2)
        operations += self.per_pair * num_patches**2
        if self.per_window_pair:
            pairs = self._side_pairs(grid.h) * self._side_pairs(grid.w)
            operations += self.per_window_pair * pairs
        return operations

    def _side_pairs(self, num_patches: int) -> int:
        """Return the pairs that windows make of patches along one side, the last window being smaller."""
        whole, rest = divmod(num_patches, self.window * self.merge_size)
        return whole * (self.window * self.merge_size) ** 2 + rest**2


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderFlops:
    """The operations of a forward pass, two for each multiplication with its addition.

    A sequence of L tokens, S of them scored, costs ``a L + h S + b L (L + 1) / 2``: the first two terms are the
    matrices, the last the attention of each token to itself and those before it. Norms, activations and softmax
    are left out, as is usual. What a model that sees spends on images is its ``tower``'s: it encodes an image once for
    all sequences of a row that show it. Integers, so every rank comes to the same sum.

    Source: Kaplan et al. 2020, arXiv 2001.08361, table 1 (2 operations per weight and token; 4 per layer, attention
    width and pair of tokens, query with key and score with value); Chowdhery et al. 2022 (PaLM), arXiv 2204.02311,
    appendix B, which counts every pair where a causal kernel computes half of them.
    """

    per_token: int
    """a: twice the weights of the layers' matrices."""
    per_scored_token: int
    """h: twice the weights of the head, which runs on scored tokens only."""
    per_pair: int
    """b: 4 x layers x attention heads x head's width."""
    tower: TowerFlops | None = None
    """None of a model that does not see."""

    def forward(self, num_tokens: int, num_scored: int) -> int:
        """Return the operations of one sequence's forward pass."""
        pairs = num_tokens * (num_tokens + 1) // 2
        return self.per_token * num_tokens + self.per_scored_token * num_scored + self.per_pair * pairs

    def train(self, num_tokens: int, num_scored: int) -> int:
        """Return the operations of forward and backward pass, the latter twice the former, without recomputation."""
        return 3 * self.forward(num_tokens, num_scored)


def language_model(model: Any) -> Any:
    """Return the part of a Hugging Face decoder that has its layers: of one that sees, what is behind its tower."""
    base = model.base_model
    return base.language_model if hasattr(base, "visual") else base


def decoder_flops(model: Any) -> DecoderFlops:
    """Count the weights of a Hugging Face decoder, sharded or whole, with the head of its words or of one score.

    A decoder in stages was counted when it was cut.
    """
    counted: DecoderFlops | None = getattr(model, "flops", None)
    if counted is not None:
        return counted
    config = model.config.get_text_config()
    layers = language_model(model).layers
    head = model.score if hasattr(model, "score") else model.get_output_embeddings()
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return DecoderFlops(
        per_token=2 * _num_matrix_weights(layers),
        per_scored_token=2 * head.weight.numel(),
        per_pair=4 * len(layers) * heads * head_width,
        tower=_tower_flops(model.base_model.visual) if hasattr(model.base_model, "visual") else None,
    )


def _tower_flops(tower: Any) -> TowerFlops:
    """Count the weights of a vision tower; one without a list of blocks of full attention has no others."""
    config = tower.config
    mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", ())]
    num_full = len(getattr(config, "fullatt_block_indexes", tower.blocks))
    return TowerFlops(
        per_patch=2 * sum(map(_num_matrix_weights, (tower.patch_embed, tower.blocks))),
        per_token=2 * sum(map(_num_matrix_weights, mergers)),
        per_pair=4 * num_full * config.hidden_size,
        per_window_pair=4 * (len(tower.blocks) - num_full) * config.hidden_size,
        merge_size=config.spatial_merge_size,
        window=getattr(config, "window_size", 0) // (config.spatial_merge_size * config.patch_size),
    )


def _num_matrix_weights(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
