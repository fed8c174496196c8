"""What a critic adds: advantages from its values, and its own loss. T: tokens of a packed row, ``sequence_T`` numbers
their sequences from 0 in order; the tokens of a sequence stand together.

Tokens outside the mask (prompts, tool results, observations) are no steps of the policy: they earn nothing, have no
value of their own here, and time does not pass on them.
"""

import torch
from torch import Tensor

from areal_async.algorithms.objective import LossTerms
from areal_async.algorithms.sequences import masked_sum


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (the critic's targets), both without gradient and 0 outside the mask [T].

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambda A_{t+1}``, ``R_t = A_t + V_t``, where t + 1
    is the next masked token of the same sequence; after its last one V and A are 0, the episode is over.

    Args:
        rewards_T: per token; an outcome stands on its sequence's last masked token.

    Source: GAE, arXiv 1506.02438 eqs. 11 and 16; as in PPO, arXiv 1707.06347 eqs. 11 and 12.
    """
    places_A = mask_T.nonzero().flatten()
    rewards_A, values_A = rewards_T.detach()[places_A], values_T.detach()[places_A]
    sequence_A = sequence_T[places_A]
    is_last_A = torch.ones_like(sequence_A, dtype=torch.bool)
    is_last_A[:-1] = sequence_A[1:] != sequence_A[:-1]
    next_values_A = torch.where(is_last_A, values_A.new_zeros(()), values_A.roll(-1))
    delta_A = rewards_A + gamma * next_values_A - values_A
    advantages_A = _discounted_sums(delta_A, is_last_A, gamma * gae_lambda)
    advantages_T = torch.zeros_like(values_T.detach()).index_copy(0, places_A, advantages_A)
    returns_T = torch.zeros_like(values_T.detach()).index_copy(0, places_A, advantages_A + values_A)
    return advantages_T, returns_T


def reward_to_go(rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return ``sum_{i >= t} gamma^(i - t) r_i`` over the masked tokens of the same sequence [T].

    With rewards of ``kl_rewards`` and gamma 1 these are REINFORCE++'s advantages before normalisation,
    ``r(x, y) - beta sum_{i >= t} KL(i)``, arXiv 2501.03262.
    """
    returns_T, _ = gae(rewards_T, torch.zeros_like(rewards_T), mask_T, sequence_T, gamma=gamma, gae_lambda=1.0)
    return returns_T


def _discounted_sums(delta_A: Tensor, is_last_A: Tensor, factor: float) -> Tensor:
    """Solve ``A_t = delta_t + factor * A_{t+1}``, starting anew after each last token, for all sequences at once.

    Tokens are taken by their distance to the end of their sequence: as many passes as the longest has tokens.
    """
    if not len(delta_A):
        return delta_A
    places_A = torch.arange(len(delta_A), device=delta_A.device)
    ends_A = torch.where(is_last_A, places_A, len(delta_A)).flip(0).cummin(0).values.flip(0)
    distance_A = ends_A - places_A
    order_A = distance_A.argsort(stable=True)
    sums_A = delta_A.clone()
    done = 0
    for distance, count in enumerate(distance_A.bincount().tolist()):
        if distance:
            here = order_A[done : done + count]
            sums_A[here] += factor * sums_A[here + 1]
        done += count
    return sums_A


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    mask_T: Tensor,
    *,
    value_clip: float | None,
    weight_T: Tensor | None = None,
) -> LossTerms:
    """Return the summed squared error of a critic's values.

    ``0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)``; without a ``value_clip`` ``0.5 (V - R)^2``.

    Args:
        old_values_T: by the critic that the step started from.
        value_clip: eps, in units of reward; None for none.
        weight_T: what each token counts (``aggregation``).

    Source: PPO's value function loss, arXiv 1707.06347 eq. 9; the clip is of its implementations, arXiv 2005.12729.
    """
    zero = values_T.new_zeros(())
    values, old, returns = (torch.where(mask_T, one, zero) for one in (values_T, old_values_T.detach(), returns_T))
    errors = (values - returns.detach()).square()
    taken = torch.zeros_like(mask_T)
    if value_clip is not None:
        clipped = (old + (values - old).clamp(-value_clip, value_clip) - returns.detach()).square()
        errors, taken = torch.maximum(errors, clipped), clipped > errors
    shares = torch.ones_like(errors) if weight_T is None else weight_T
    with torch.no_grad():
        sums = {"value": masked_sum(values, mask_T), "value_clipped": (taken & mask_T).sum()}
    return LossTerms(loss=0.5 * masked_sum(errors * shares, mask_T), sums=sums, maxima={})
