"""Losses on pairs of answers, one of them preferred. P: pairs. Each returns the mean over its pairs.

``dpo_loss`` is offered to users, for objectives of their own; no preset takes it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_async.algorithms.objective import LossTerms


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


def packed_bradley_terry(scores_T: Tensor, mask_T: Tensor) -> LossTerms:
    """Return ``bradley_terry_loss`` of a packed row, summed over its pairs. T: answers, each scored once.

    Answers stand in pairs, the preferred one first; those outside the mask are none. ``sums`` has ``right``, the pairs
    whose preferred answer has the higher score, and ``margin``, by how much.
    """
    scores_A = scores_T[mask_T]
    chosen_P, rejected_P = scores_A[0::2], scores_A[1::2]
    loss = -F.logsigmoid(chosen_P - rejected_P).sum()
    with torch.no_grad():
        margins_P = chosen_P - rejected_P
        sums = {"right": (margins_P > 0).sum(), "margin": margins_P.sum()}
    return LossTerms(loss=loss, sums=sums, maxima={})
