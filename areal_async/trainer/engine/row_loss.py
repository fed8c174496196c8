"""The policy's loss of one packed row: what its objective is told of the row's scored tokens. S: scored tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from areal_async.algorithms.objective import LossTerms, Objective, ScoredTokens
from areal_async.trainer.packing.rows import REFERENCE, PackedRow

Scores = tuple[Tensor, Tensor]
"""Logprob and entropy of each scored token, both [S]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    """The loss of the rows of a mini-batch (``execution.Loss``)."""

    objective: Objective
    starts_S: Sequence[Tensor] | None
    """Logprobs of each row by the weights that the step starts from; None where those are being trained."""
    keeps_S: Sequence[Tensor] | None
    """Which tokens of each row count; None where all do."""

    def __call__(self, number: int, row: PackedRow, scores: Scores) -> LossTerms:
        """Return the loss of the row of this number in the mini-batch."""
        logprobs_S, entropy_S = scores
        return self.objective(
            ScoredTokens(
                logprobs_T=logprobs_S,
                entropy_T=entropy_S,
                start_T=self.starts_S[number] if self.starts_S else logprobs_S.detach(),
                behave_T=row.behave_S,
                advantages_T=row.advantages_S,
                mask_T=row.mask_S,
                current_T=row.current_S,
                sequence_T=row.sequence_S,
                weight_T=row.weights_S,
                age_T=row.ages_S,
                reference_T=row.columns_S.get(REFERENCE),
                keep_T=self.keeps_S[number] if self.keeps_S else None,
            )
        )
