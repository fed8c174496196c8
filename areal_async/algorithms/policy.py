"""The policy loss: a ratio, a surrogate, a correction, penalties and weights, each chosen by name and put together.

``loss = sum_t weight_t * (correction_t * surrogate_t + kl_coef * kl_t - entropy_coef * entropy_t)``
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_async.algorithms.corrections import Correction, uncorrected
from areal_async.algorithms.kl import MAX_DISTANCE, k3, kl_estimate
from areal_async.algorithms.objective import LossTerms, ScoredTokens
from areal_async.algorithms.ratios import LogRatio, is_beyond, loglinear_proximal, token_log_ratio
from areal_async.algorithms.sequences import masked_max, masked_sum
from areal_async.algorithms.surrogates import Surrogate
from areal_async.protocol.fields import MAX_LOGPROB

GAP_EDGES = (0.001, 0.01, 0.1, 1.0)
"""Edges of the histogram of |trainer - server| logprob, in nats."""


def gap_name(edge: float) -> str:
    """Return the name of the sum that counts the start version's tokens whose gap is larger."""
    return f"gap_over_{edge:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss as a record of choices; calling it gives the summed loss of the masked tokens.

    Decoupled, its ratio is taken, and clipped, against the weights that the step started from, and each token is
    weighted by what ``correction`` makes of pi_start / pi_behave, through which no gradient flows.

    Source: PPO, arXiv 1707.06347 eq. 7; decoupled, AReaL, arXiv 2505.24298 eq. 5. Each choice names its own.
    """

    surrogate: Surrogate
    log_ratio: LogRatio = token_log_ratio
    decoupled: bool = False
    """Take the ratio against the proximal policy and correct for the rest, instead of against the server's logprobs."""
    correction: Correction = uncorrected
    """Weight of each token in a decoupled loss; another has none."""
    is_loglinear: bool = False
    """Take the proximal policy from a line between behaviour and trained policy, instead of a forward pass."""
    kl_coef: float = 0.0
    """beta: weight of the distance to the reference, as a loss."""
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    m2_threshold: float | None = None
    """tau_M2: ``keep_T`` is to be made of the mini-batch with this (``corrections.second_moment_cutoff``)."""

    def __call__(self, tokens: ScoredTokens) -> LossTerms:
        """Return the loss and what to report.

        Raises:
            ValueError: a choice needs what ``tokens`` does not hold.
        """
        mask = tokens.mask_T
        zero = tokens.logprobs_T.new_zeros(())
        # Whatever stands outside the mask must reach neither the loss nor, as 0 * nan would, a gradient.
        logprobs, advantages, start, behave = (
            torch.where(mask, values, zero)
            for values in (tokens.logprobs_T, tokens.advantages_T, tokens.start_T.detach(), tokens.behave_T)
        )
        behave = behave.clamp(-MAX_LOGPROB, MAX_LOGPROB)  # else infinity less infinity would be nan
        gap = start - behave
        proximal = start
        if self.is_loglinear:
            proximal = loglinear_proximal(logprobs, behave, _needed(tokens.age_T, "age_T"))
        anchor = proximal if self.decoupled else behave
        log_ratio = self.log_ratio(logprobs, anchor, mask, tokens.sequence_T)
        weight = self.correction(proximal - behave, mask, tokens.sequence_T) if self.decoupled else torch.ones_like(gap)
        losses, taken = self.surrogate(logprobs, log_ratio, advantages)
        losses, taken = losses * weight, taken | is_beyond(logprobs, anchor)
        if self.m2_threshold is not None:
            keep = _needed(tokens.keep_T, "keep_T")
            losses, taken = torch.where(keep, losses, zero), taken | ~keep
        shares = torch.ones_like(gap) if tokens.weight_T is None else tokens.weight_T
        loss = masked_sum(losses * shares, mask)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * masked_sum(tokens.entropy_T * shares, mask)
        sums: dict[str, Tensor] = {}
        if self.kl_coef:
            kl = kl_estimate(logprobs, tokens.reference_T, mask, estimator=self.kl_estimator)
            loss = loss + self.kl_coef * masked_sum(kl * shares, mask)
            sums["kl"] = kl.detach().sum()
        current = mask & tokens.current_T
        with torch.no_grad():
            ratio = log_ratio.exp()
            sums |= {
                "entropy": masked_sum(tokens.entropy_T, mask),
                "ratio": masked_sum(ratio, mask),
                "clipped": (mask & taken).sum(),
                "clipped_lower": (mask & taken & (log_ratio < 0)).sum(),
                "behave_weight": masked_sum(weight, mask),
                "gap": gap.abs().sum(),
                "behave_kl": k3(-gap).sum(),
                "current_gap": masked_sum(gap.abs(), current),
                "current": current.sum(),
                **{gap_name(edge): (current & (gap.abs() > edge)).sum() for edge in GAP_EDGES},
            }
            maxima = {
                "ratio": masked_max(ratio, mask),
                "behave_weight": masked_max(weight, mask),
                "current_gap": masked_max(gap.abs(), current),
                "current_ratio_deviation": masked_max(gap.clamp(max=MAX_DISTANCE).expm1().abs(), current),
            }
        return LossTerms(loss=loss, sums=sums, maxima=maxima)


def _needed(values_T: Tensor | None, name: str) -> Tensor:
    if values_T is None:
        raise ValueError(f"policy loss: got no {name}, need it for the choices of this loss; give it with the tokens")
    return values_T
