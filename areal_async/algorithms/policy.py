"""The clipped policy loss, with and without the decoupled correction for stale samples."""

import torch
from torch import Tensor

from areal_async.algorithms.objective import LossTerms, ScoredTokens


def policy_loss(
    tokens: ScoredTokens,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    behave_weight_cap: float | None = None,
    entropy_coef: float = 0.0,
) -> LossTerms:
    """Return the summed PPO-clip loss of the masked tokens.

    With a ``behave_weight_cap`` the objective is decoupled: the ratio is taken, and clipped, against the weights
    the step started from, and each token is weighted by min(pi_start / pi_behave, cap), through which no gradient
    flows. Without one the ratio is taken against the server's logprobs directly.

    Args:
        eps_clip_higher: upper clip range; None takes ``eps_clip``.
        entropy_coef: the summed entropy times this is taken off the loss.

    Source: PPO, arXiv 1707.06347 eq. 7; decoupled, arXiv 2505.24298 eq. 5; upper range, DAPO, arXiv 2503.14476.
    """
    mask, advantages = tokens.mask_T, tokens.advantages_T
    start, logprobs = tokens.start_T.detach(), tokens.logprobs_T
    zero = logprobs.new_zeros(())
    # Where the mask is False anything may stand, and inf * 0 is not 0: mask each difference before its exponential.
    gap = torch.where(mask, start - tokens.behave_T, zero)
    if behave_weight_cap is None:
        ratio = torch.where(mask, logprobs - tokens.behave_T, zero).exp()
        weight = torch.ones_like(gap)
    else:
        ratio = torch.where(mask, logprobs - start, zero).exp()
        weight = gap.exp().clamp(max=behave_weight_cap)
    clipped_ratio = ratio.clamp(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_higher is None else eps_clip_higher))
    surrogate, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = _masked_sum(torch.maximum(surrogate, clipped) * weight, mask)
    if entropy_coef:
        loss = loss - entropy_coef * _masked_sum(tokens.entropy_T, mask)
    current = mask & tokens.current_T
    with torch.no_grad():
        sums = {
            "entropy": _masked_sum(tokens.entropy_T, mask),
            "ratio": _masked_sum(ratio, mask),
            "clipped": (mask & (clipped > surrogate)).sum(),
            "behave_weight": _masked_sum(weight, mask),
            "gap": gap.abs().sum(),
            "current_gap": _masked_sum(gap.abs(), current),
            "current": current.sum(),
        }
        maxima = {
            "ratio": _masked_max(ratio, mask),
            "behave_weight": _masked_max(weight, mask),
            "current_gap": _masked_max(gap.abs(), current),
            "current_ratio_deviation": _masked_max(gap.expm1().abs(), current),
        }
    return LossTerms(loss=loss, sums=sums, maxima=maxima)


def _masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, values_T, values_T.new_zeros(())).sum()


def _masked_max(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the largest of these non-negative values, 0 for none."""
    return torch.where(mask_T, values_T, values_T.new_zeros(())).amax()
