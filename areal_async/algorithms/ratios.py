"""The importance ratio, in logarithms: how much likelier the trained weights find a token than the anchor did.

The anchor is the proximal policy where the objective is decoupled, else the behaviour policy. All tensors are [T];
results are 0 where the mask is False. Gradients flow through ``logprobs_T``.
"""

from collections.abc import Callable

from torch import Tensor

from areal_async.algorithms.sequences import masked, sequence_means

MAX_LOG_RATIO = 20.0
"""Either way, of one token: beyond it the loss is as there, without a gradient. The exponential of what a server may
report would not be finite; that of this is, and its square."""

LogRatio = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(logprobs_T, anchor_T, mask_T, sequence_T) -> log ratio [T]."""


def token_log_ratio(logprobs_T: Tensor, anchor_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """``log r_t = log pi_theta(o_t) - log pi_anchor(o_t)``, each token for itself.

    Source: PPO, arXiv 1707.06347 section 3.
    """
    # Where the mask is False anything may stand, and inf * 0 is not 0: mask the difference before any exponential.
    log_ratio_T = masked(logprobs_T - anchor_T.detach(), mask_T)
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def is_beyond(logprobs_T: Tensor, anchor_T: Tensor) -> Tensor:
    """Return where a token's own ratio is bounded, boolean [T]."""
    return (logprobs_T - anchor_T).detach().abs() > MAX_LOG_RATIO


def sequence_log_ratio(logprobs_T: Tensor, anchor_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """``log s = (1 / |y|) sum_t log r_t``: every token carries the length-normalised ratio of its sequence.

    The gradient reaches every token of the sequence through each of them; with one advantage per sequence use this.

    Source: GSPO, arXiv 2507.18071 eq. 7.
    """
    log_ratio_T = token_log_ratio(logprobs_T, anchor_T, mask_T, sequence_T)
    return masked(sequence_means(log_ratio_T, mask_T, sequence_T), mask_T)


def sequence_token_log_ratio(logprobs_T: Tensor, anchor_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """``log s_t = sg[log s] + log pi_theta(o_t) - sg[log pi_theta(o_t)]``: the sequence's value, the token's gradient.

    With one advantage per sequence and a mean over the sequence it gives GSPO's gradient; with one per token, as under
    per-turn credit, each token is moved by its own.

    Source: GSPO-token, arXiv 2507.18071 eq. 14.
    """
    value_T = sequence_log_ratio(logprobs_T, anchor_T, mask_T, sequence_T).detach()
    return masked(value_T + (logprobs_T - logprobs_T.detach()), mask_T)


def loglinear_proximal(logprobs_T: Tensor, behave_T: Tensor, age_T: Tensor) -> Tensor:
    """Return the proximal policy's logprobs without a forward pass, on the line from behaviour to trained policy [T].

    ``log pi_prox = alpha log pi_behave + (1 - alpha) log pi_theta`` with ``alpha = 1 / d``, where d counts the versions
    from the one that sampled the token to the one being made: its age in this step plus 1. A token of the
    step's start version (age 0) keeps its behaviour logprob. No gradient flows.

    Source: A-3PO, arXiv 2512.06547.
    """
    alpha_T = 1.0 / (age_T.to(logprobs_T.dtype) + 1.0)
    return alpha_T * behave_T + (1.0 - alpha_T) * logprobs_T.detach()


RATIOS: dict[str, LogRatio] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "sequence_token": sequence_token_log_ratio,
}
