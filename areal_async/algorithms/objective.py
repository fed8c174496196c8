"""What a loss is given and what it returns. T: scored tokens of one packed row."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredTokens:
    """Every tensor is [T]. Gradients flow through ``logprobs_T`` and ``entropy_T`` only."""

    logprobs_T: Tensor
    """Logprobs by the weights being trained, in nats."""
    entropy_T: Tensor
    """Entropy of the distribution that each token was drawn from, by the weights being trained, in nats."""
    start_T: Tensor
    """Logprobs by the weights that the training step starts from: the proximal policy."""
    behave_T: Tensor
    """Logprobs as the server reported them: the behaviour policy. Anything where ``mask_T`` is False."""
    advantages_T: Tensor
    """Advantage of each token: what its reward says beyond what was to be expected."""
    mask_T: Tensor
    """Boolean; False takes a token out of the loss and of every number reported."""
    current_T: Tensor
    """Boolean; True on tokens that were sampled from the step's start version."""
    sequence_T: Tensor | None = None
    """Number of each token's sequence in the row, from 0; what works on whole sequences needs it."""
    weight_T: Tensor | None = None
    """What each token counts in the sum (``aggregation``); ``None`` is 1 for all."""
    age_T: Tensor | None = None
    """Versions between the one that sampled the token and the step's start; the log-linear proximal policy needs it."""
    reference_T: Tensor | None = None
    """Logprobs by the reference model; the KL penalty needs it."""
    keep_T: Tensor | None = None
    """Boolean; False takes a token's policy gradient away, and leaves it in the denominator (M2PO's mask)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTerms:
    """A loss summed over its tokens, and what to report about it. The caller divides by the denominator."""

    loss: Tensor
    """Sum over the tokens, a scalar that gradients flow through."""
    sums: dict[str, Tensor]
    """Detached sums over tokens; add over rows and ranks."""
    maxima: dict[str, Tensor]
    """Detached maxima over tokens; take the largest over rows and ranks."""


Objective = Callable[[ScoredTokens], LossTerms]
"""Makes the loss of the scored tokens of one packed row."""
