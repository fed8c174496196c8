"""The engine of a reward model: scores of whole answers, learned from which of two is preferred.

The invariants are those of ``sharded``. The two answers of a pair couple in the loss, so they share a packed row; a
pair is the unit of packing. Every public method is a collective, called from one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from areal_async.algorithms.aggregation import Aggregation
from areal_async.algorithms.objective import LossTerms
from areal_async.algorithms.preference import packed_bradley_terry
from areal_async.config.settings import ModelSettings, TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.model import load_critic
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.stages import StagedModel
from areal_async.trainer.engine.sharded import TrainedEngine
from areal_async.trainer.engine.stats import share
from areal_async.trainer.packing.rows import PackedRow, TrainRow, unsampled_row

PER_PAIR = Aggregation("sequence_sum")
"""A pair's two scores are half a unit each: the denominator counts pairs."""


class Pair(NamedTuple):
    """Two conversations that differ in their last answer."""

    chosen: list[int]
    rejected: list[int]

    @property
    def num_tokens(self) -> int:
        """What the pair takes of a packed row, the places of its scores included."""
        return len(self.chosen) + len(self.rejected) + len(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairStats:
    """What one training step did. Equal on every rank; means are over the pairs of all."""

    loss: float
    """Mean of -log sigmoid(preferred - other), Bradley and Terry's."""
    accuracy: float
    """Share of pairs whose preferred answer had the higher score, before the update."""
    margin_mean: float
    """Score of the preferred answer less that of the other."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    num_pairs: int
    num_skipped: int
    """Updates left out because the gradient was not finite."""


class PairEngine(TrainedEngine[Tensor]):
    """A sequence classifier of one label sharded over the ranks (FSDP2), its optimizer and its loss."""

    def __init__(self, *, model: ModelSettings, trainer: TrainerSettings, ranks: Ranks) -> None:
        super().__init__(load_critic, model=model, trainer=trainer, ranks=ranks, aggregation=PER_PAIR, num_together=2)
        if self.vision is not None:
            raise UserError(
                f"model.path: got {model.path}, which sees, need a model of text; pairs of answers show no images"
            )

    def train_step(self, pairs: Sequence[Pair], *, step: int, total_steps: int) -> PairStats:
        """Train on this rank's pairs; ranks may hold different numbers of them, even none.

        Args:
            step: counts from 1; decides the learning rate.
            total_steps: length of the learning rate's schedule.
        """
        lr = self._begin(step, total_steps=total_steps)
        tally = self._update_with(self._minibatches(_rows(pairs)), lambda _: _loss, step=step, event="pairs.skipped")
        sums = tally.totals(self.dims.data)
        return PairStats(
            loss=share(sums, "loss", of="units"),
            accuracy=share(sums, "right", of="units"),
            margin_mean=share(sums, "margin", of="units"),
            grad_norm=tally.grad_norm,
            lr=lr,
            num_pairs=round(sums.get("units", 0.0)),
            num_skipped=tally.num_skipped,
        )

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """Return the scores of this rank's pairs [P, 2]: of the preferred answers, and of the others."""
        values = self._infer(_rows(pairs), self._execution.infer)
        return torch.tensor([float(row[-1]) for row in values]).view(-1, 2)

    def save_weights(self, directory: Path) -> dict[str, str]:
        """Write a Hugging Face folder atomically; return {safetensors file: sha256} on every rank. A collective."""
        classifier = self._model.decoder
        # The folder it came from may hold a model that generates.
        decoder = classifier.own_stages[0].decoder if isinstance(classifier, StagedModel) else classifier
        classifier.config.architectures = [type(decoder).__name__]
        return super().save_weights(directory)


def _loss(_number: int, row: PackedRow, scores_S: Tensor) -> LossTerms:
    return packed_bradley_terry(scores_S, row.mask_S)


def _rows(pairs: Sequence[Pair]) -> list[TrainRow]:
    return [_row(answer, index) for index, pair in enumerate(pairs) for answer in pair]


def _row(token_ids: Sequence[int], index: int) -> TrainRow:
    """Return an answer, scored at its last token.

    A critic's value is of what stands before a token: so one more follows, which no other can see.
    """
    return unsampled_row([*token_ids, token_ids[-1]], [False] * len(token_ids) + [True], index=index)
