"""Surrogates: the loss of one token, given its logprob, its log ratio and its advantage. All tensors [T].

Each returns the loss and the tokens at which its clip or mask acted: their gradient is gone, CISPO's is smaller. What
stands outside the loss mask is 0 already. The sign is a loss's: the papers' objectives are maximised, these are
minimised.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs_T, log_ratio_T, advantages_T) -> (loss [T], where its clip acted [T], boolean)."""


def ppo_clip(
    logprobs_T: Tensor,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``; for A < 0 at most ``-c A`` with dual clip.

    Args:
        dual_clip: c > 1, or None for a loss that grows without bound with the ratio of a token of negative advantage.

    Source: PPO, arXiv 1707.06347 eq. 7; two ranges (clip-higher), DAPO, arXiv 2503.14476 eq. 10; dual clip,
    arXiv 1912.09729: ``max(min(r A, clip(r) A), c A)`` for A < 0.
    """
    ratio = log_ratio_T.exp()
    surrogate = -advantages_T * ratio
    clipped = -advantages_T * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    loss, taken = torch.maximum(surrogate, clipped), clipped > surrogate
    if dual_clip is not None:
        bound = -advantages_T * dual_clip
        is_bound = (advantages_T < 0) & (loss > bound)
        loss, taken = torch.where(is_bound, bound, loss), taken | is_bound
    return loss, taken


def reinforce(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Tensor]:
    """``-A log pi_theta``: the policy gradient without a ratio.

    Source: REINFORCE (Williams 1992), as RLOO takes it, arXiv 2402.14740.
    """
    return -advantages_T * logprobs_T, _none(advantages_T)


def importance(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Tensor]:
    """``-r A``: importance sampling without a clip; ``keep_T`` of M2PO masks it.

    Source: arXiv 1707.06347 eq. 6; M2PO, arXiv 2510.01161.
    """
    return -advantages_T * log_ratio_T.exp(), _none(advantages_T)


def cispo(
    logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, *, eps_clip: float, eps_clip_higher: float
) -> tuple[Tensor, Tensor]:
    """``-sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi_theta``: the weight is clipped, no token loses its gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585 eqs. 4 and 5. The paper has no lower bound: ``eps_clip`` 1.
    """
    ratio = log_ratio_T.detach().exp()
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    return -weight * advantages_T * logprobs_T, weight != ratio


def sapo(
    logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, Tensor]:
    """``-f(r) A`` with the soft gate ``f(r) = (4 / tau) sigmoid(tau (r - 1))``, tau_pos for A > 0, else tau_neg.

    At r = 1 the gate's slope is 1, so the gradient is the policy gradient; it fades smoothly on both sides.

    Source: SAPO, arXiv 2511.20347.
    """
    tau = torch.full_like(log_ratio_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    return -advantages_T * torch.sigmoid(tau * (log_ratio_T.exp() - 1.0)) * (4.0 / tau), _none(advantages_T)


def dppo_tv(
    logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, *, divergence: float
) -> tuple[Tensor, Tensor]:
    """``-M r A``, where M is 0 once the token's probability has moved, with A's sign, by more than ``divergence``.

    The binary total variation of a token is ``|pi_theta(o_t) - pi_anchor(o_t)|``. So a rare token may change by a
    large ratio, and a likely one may not move much mass. Takes a token ratio.

    Source: DPPO with binary TV, arXiv 2602.04879.
    """
    with torch.no_grad():
        moved = logprobs_T.exp() - (logprobs_T - log_ratio_T).exp()
        taken = torch.where(advantages_T > 0, moved > divergence, moved < -divergence) & (advantages_T != 0)
    loss = -advantages_T * log_ratio_T.exp()
    return torch.where(taken, loss.new_zeros(()), loss), taken


def _none(like_T: Tensor) -> Tensor:
    return torch.zeros_like(like_T, dtype=torch.bool)
