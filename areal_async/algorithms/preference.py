"""Losses on pairs of answers, one of them preferred. P: pairs. Each returns the mean over its pairs."""

import torch.nn.functional as F
from torch import Tensor


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return direct preference optimisation's loss.

    ``-log sigmoid(beta h)`` with ``h = log pi(y_w) / pi_ref(y_w) - log pi(y_l) / pi_ref(y_l)``.

    Args:
        chosen_P: log likelihood of the whole preferred answer (``sequences.sequence_sums`` of its tokens').
        beta: strength of the pull to the reference.
        label_smoothing: chance that a label is wrong: ``-(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h)``.

    Source: DPO, arXiv 2305.18290 eq. 7; label smoothing, Mitchell 2023, "A note on DPO with noisy preferences".
    """
    margin_P = beta * ((chosen_P - reference_chosen_P.detach()) - (rejected_P - reference_rejected_P.detach()))
    losses_P = -(1 - label_smoothing) * F.logsigmoid(margin_P) - label_smoothing * F.logsigmoid(-margin_P)
    return losses_P.mean()


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return a reward model's loss on pairs of its scores, ``-log sigmoid(r(y_w) - r(y_l))``.

    Source: Bradley and Terry 1952; InstructGPT, arXiv 2203.02155 eq. 1.
    """
    return -F.logsigmoid(chosen_P - rejected_P).mean()
