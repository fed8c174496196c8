"""Corrections for tokens that other weights, or another engine, sampled: a weight per token without a gradient.

They look at ``k = pi_proximal / pi_behave``, given as its logarithm ``gap_T``, 0 where the mask is False. The
proximal policy is the trainer's own view of the weights that the step starts from, so k carries both staleness and
the mismatch between trainer and server. All tensors [T].
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from areal_async.algorithms.sequences import sequence_means, sequence_totals

Correction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(gap_T, mask_T, sequence_T) -> weight [T]."""


def uncorrected(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """``w = 1``."""
    return torch.ones_like(gap_T)


def truncate(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None, *, cap: float) -> Tensor:
    """``w = min(k, C)``: truncated importance sampling.

    Source: the behaviour weight of decoupled PPO, AReaL, arXiv 2505.24298 eq. 5, capped; TIS, Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training".
    """
    return gap_T.exp().clamp(max=cap)


def icepop(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None, *, low: float, high: float) -> Tensor:
    """``w = k`` where ``low <= k <= high``, else 0: a token on which the two disagree much is left out.

    Source: IcePop, Ring-1T, arXiv 2510.18855, with alpha = 0.5 and beta = 5.
    """
    weight = gap_T.exp()
    return torch.where(_within(weight, low, high) > 0, weight, 0.0)  # inf * 0 is not 0


def reject_tokens(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None, *, low: float, high: float) -> Tensor:
    """``w = 1`` where ``low <= k <= high``, else 0: rejection by token."""
    return _within(gap_T.exp(), low, high)


def reject_sequences(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None, *, low: float, high: float) -> Tensor:
    """``w = 1`` on sequences whose geometric mean of k is within ``low`` to ``high``, else 0: rejection by sequence."""
    return _within(sequence_means(gap_T, mask_T, sequence_T).exp(), low, high)


def truncate_sequences(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None, *, cap: float) -> Tensor:
    """``w = min(prod_t k_t, C)``: every token carries the truncated weight of its whole sequence."""
    return sequence_totals(gap_T, mask_T, sequence_T).exp().clamp(max=cap)


def second_moment_cutoff(squares_N: Tensor, *, threshold: float) -> Tensor:
    """Return the value below which M2PO keeps a token of the batch, infinite where it keeps all.

    With ``m_i = (log pi_theta - log pi_behave)^2`` the largest are masked until the mean of the kept ones is at most
    ``threshold`` (tau_M2); where even the smallest is over it, none is kept. Of equal values all are kept or none, so
    that the order of the tokens does not matter.

    Args:
        squares_N: m of every trained token of the mini-batch, over all rows and ranks.

    Source: M2PO, arXiv 2510.01161, with tau_M2 = 0.04.
    """
    ordered_N, _ = squares_N.double().sort()
    means_N = ordered_N.cumsum(0) / torch.arange(1, len(ordered_N) + 1, device=ordered_N.device)
    # The means of the sorted prefixes only grow, so the first that is over the threshold is where the cut is.
    return torch.where(means_N > threshold, ordered_N, math.inf).amin() if len(ordered_N) else ordered_N.new_tensor(0.0)


def _within(weight_T: Tensor, low: float, high: float) -> Tensor:
    return ((weight_T >= low) & (weight_T <= high)).to(weight_T.dtype)
