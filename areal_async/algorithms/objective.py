"""What a loss is given and what it returns. T: scored tokens of one packed row."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredTokens:
    """Every tensor is [T]. Gradients flow through ``logprobs_T`` and ``entropy_T`` only."""

    logprobs_T: Tensor
    """Of the weights being trained."""
    entropy_T: Tensor
    """Of the distribution that each token was drawn from, by the weights being trained, in nats."""
    start_T: Tensor
    """Logprobs by the weights that the training step starts from: the proximal policy."""
    behave_T: Tensor
    """Logprobs as the server reported them: the behaviour policy. Anything where ``mask_T`` is False."""
    advantages_T: Tensor
    mask_T: Tensor
    """Boolean; False takes a token out of the loss and of every number reported."""
    current_T: Tensor
    """Boolean; True on tokens that were sampled from the step's start version."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTerms:
    """A loss summed over its tokens, and what to report about it. The caller divides by a token count."""

    loss: Tensor
    sums: dict[str, Tensor]
    """Detached sums over tokens; add over rows and ranks."""
    maxima: dict[str, Tensor]
    """Detached maxima over tokens; take the largest over rows and ranks."""


Objective = Callable[[ScoredTokens], LossTerms]
