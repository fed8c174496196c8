"""GRPO's loss as a function of its numbers."""

import functools

from areal_async.algorithms.corrections import truncate, uncorrected
from areal_async.algorithms.objective import LossTerms, ScoredTokens
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.surrogates import ppo_clip


def policy_loss(
    tokens: ScoredTokens,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    behave_weight_cap: float | None = None,
    entropy_coef: float = 0.0,
) -> LossTerms:
    """Return GRPO's loss of these choices: decoupled where there is a cap on the behaviour weight."""
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    loss = PolicyLoss(
        surrogate=functools.partial(ppo_clip, eps_clip=eps_clip, eps_clip_higher=high),
        decoupled=behave_weight_cap is not None,
        correction=uncorrected if behave_weight_cap is None else functools.partial(truncate, cap=behave_weight_cap),
        entropy_coef=entropy_coef,
    )
    return loss(tokens)
