"""What a decoder costs: floating-point operations, by which work is shared and utilisation measured. No tensors."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderFlops:
    """The operations of a forward pass, two for each multiplication with its addition.

    A sequence of L tokens, S of them scored, costs ``a L + h S + b L (L + 1) / 2``: the first two terms are the
    matrices, the last the attention of each token to itself and those before it. Norms, activations and softmax
    are left out, as is usual. So is the tower of a model that sees: it encodes an image once for all sequences of a row
    that show it, and what it costs depends on who shares the row. Integers, so every rank comes to the same sum.

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
        per_token=2 * sum(weight.numel() for weight in layers.parameters() if weight.ndim > 1),
        per_scored_token=2 * head.weight.numel(),
        per_pair=4 * len(layers) * heads * head_width,
    )
