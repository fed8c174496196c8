"""The distance to a reference policy, estimated at the sampled tokens. All tensors [T].

``d = log pi_theta(o_t) - log pi_ref(o_t)``. As a loss the estimate is added, times beta, to every token's loss; as a
reward it is taken, times beta and without a gradient, off every token's reward.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from areal_async.algorithms.sequences import masked, sequence_sums

MAX_DISTANCE = 20.0
"""Either way, of one token in nats: beyond, every estimate is as there, without a gradient (verl's bound before k3's
exponential, ``core_algos.kl_penalty``)."""
MAX_ESTIMATE = 10.0
"""Either way, of one token in nats, whichever the estimator: beyond, it is as there, without a gradient (OpenRLHF's
``compute_approx_kl``, for all three; verl's for k3)."""

Estimator = Callable[[Tensor], Tensor]
"""d_T -> estimate [T]."""


def k1(d_T: Tensor) -> Tensor:
    """``d``: unbiased up to its bound, can be negative.

    As a loss its expected gradient is 0, so it belongs into the reward.
    """
    return _bounded(d_T, MAX_ESTIMATE)


def k2(d_T: Tensor) -> Tensor:
    """``d^2 / 2``: biased in value, its gradient is that of the KL divergence where tokens are on-policy."""
    return _bounded(_bounded(d_T, MAX_DISTANCE).square() / 2, MAX_ESTIMATE)


def k3(d_T: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased up to its bound, and never negative.

    Source: also GRPO, arXiv 2402.03300 eq. 4.
    """
    d_T = _bounded(d_T, MAX_DISTANCE)
    return _bounded(torch.expm1(-d_T) + d_T, MAX_ESTIMATE)


def _bounded(values_T: Tensor, most: float) -> Tensor:
    return values_T.clamp(-most, most)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor | None, mask_T: Tensor, *, estimator: str) -> Tensor:
    """Return the estimate at each token, 0 where the mask is False [T].

    Raises:
        ValueError: there is no reference; a distance to nothing is not 0.
    """
    if reference_T is None:
        raise ValueError("kl: got no reference logprobs, need those of a reference model; load one or set kl_coef to 0")
    return ESTIMATORS[estimator](masked(logprobs_T - reference_T.detach(), mask_T))


def kl_rewards(rewards_T: Tensor, kl_T: Tensor, mask_T: Tensor, *, kl_coef: float) -> Tensor:
    """Return each token's reward less ``kl_coef`` times its distance; 0 where the mask is False [T].

    Args:
        rewards_T: usually the outcome on the last token of each sequence and 0 elsewhere (``last_token_rewards``).

    Source: RLHF with PPO (InstructGPT), arXiv 2203.02155; REINFORCE++, arXiv 2501.03262, with k1.
    """
    return masked(rewards_T - kl_coef * kl_T.detach(), mask_T)


def last_token_rewards(rewards_N: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Put each sequence's reward on its last masked token, 0 elsewhere [T].

    Args:
        rewards_N: by sequence.
    """
    places = torch.arange(len(sequence_T), device=sequence_T.device)
    last_N = torch.full_like(places, -1).scatter_reduce(0, sequence_T, torch.where(mask_T, places, -1), "amax")
    is_last_T = mask_T & (last_N[sequence_T] == places)
    return torch.where(is_last_T, rewards_N[sequence_T], rewards_N.new_zeros(()))


def sequence_kl(kl_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return each sequence's distance, added up over its tokens; what RLOO takes off an outcome [T slots].

    Source: RLOO, arXiv 2402.14740, ``R(x, y) = r(x, y) - beta log pi(y) / pi_ref(y)`` with k1.
    """
    return sequence_sums(kl_T.detach(), mask_T, sequence_T)
