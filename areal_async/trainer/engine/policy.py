"""The engine of the policy: rows in, one weights version further out; and of a reference, which stays as it is.

The invariants are those of ``sharded``. Every public method is a collective unless it says otherwise: all ranks
call it, in the same order, from one thread each.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from areal_async.algorithms.aggregation import TOKEN_MEAN, Aggregation
from areal_async.algorithms.corrections import second_moment_cutoff
from areal_async.algorithms.objective import LossTerms, Objective, ScoredTokens
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.presets import aggregation, policy_objective
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.trainer.engine import lora, weights
from areal_async.trainer.engine.checkpoint import TrainState
from areal_async.trainer.engine.lora import AdapterState
from areal_async.trainer.engine.model import PolicyModel, load_policy
from areal_async.trainer.engine.parallel.execution import Loss
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.sharded import ModelEngine, TrainedEngine
from areal_async.trainer.engine.stats import StepStats
from areal_async.trainer.packing.rows import REFERENCE, START, PackedRow, TrainRow

__all__ = ["FsdpEngine", "StepStats"]

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


class FsdpEngine(TrainedEngine[Scores]):
    """A policy sharded over the ranks (FSDP2), its optimizer and its loss. World size 1 is no special case."""

    def __init__(
        self,
        *,
        model: ModelSettings,
        trainer: TrainerSettings,
        ranks: Ranks,
        objective: Objective,
        num_minibatches: int = 1,
        aggregation: Aggregation = TOKEN_MEAN,
    ) -> None:
        """Load the policy that ``model`` names; ``objective`` is its loss, summed as ``aggregation`` says."""
        super().__init__(
            load_policy,
            model=model,
            trainer=trainer,
            ranks=ranks,
            num_minibatches=num_minibatches,
            aggregation=aggregation,
        )
        self._path = model.path
        self._objective = objective
        self._base_sha256 = self._model.base_sha256 if isinstance(self._model, PolicyModel) else {}
        self._adapters = AdapterState(self._model.decoder, self._base_sha256) if trainer.lora.is_on else None

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load ``settings.model`` and make the engine that ``algorithm`` and ``trainer`` describe."""
        return cls(
            model=settings.model,
            trainer=settings.trainer,
            ranks=ranks,
            objective=policy_objective(settings),
            num_minibatches=settings.algorithm.num_minibatches,
            aggregation=aggregation(settings),
        )

    def change(self, settings: Settings) -> None:
        """Take the loss and the peak of the learning rate's schedule of these, from the next step on."""
        self._set_peak(settings.trainer.lr)
        self._objective = policy_objective(settings)

    def train_step(
        self, rows: Sequence[TrainRow], *, step: int, total_steps: int, columns: Sequence[str] = ()
    ) -> StepStats:
        """Train on this rank's rows; ranks may hold different numbers of them, even none.

        Args:
            step: counts from 1; decides the learning rate.
            total_steps: length of the learning rate's schedule.
            columns: that every rank's rows bring. ``START`` saves several updates a pass over all rows; a KL penalty
                needs ``REFERENCE``.
        """
        lr = self._begin(step, total_steps=total_steps)
        minibatches = self._minibatches(rows, columns)
        # With a single update the weights of the step's start are those being trained: no second forward pass.
        needs_starts = len(minibatches) > 1 and not self._is_loglinear
        scored = _given_starts if START in columns else self._packed_logprobs
        starts = [scored(minibatch) if needs_starts else None for minibatch in minibatches]

        def loss_of(number: int) -> Loss[Scores]:
            return RowLoss(objective=self._objective, starts_S=starts[number], keeps_S=self._kept(minibatches[number]))

        return self._update_with(minibatches, loss_of, step=step, event="update.skipped").stats(self.dims.data, lr=lr)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss, at its temperature; 0 elsewhere [L]."""
        return self._infer(rows, self._packed_logprobs)

    def plan_buckets(self, *, max_bytes: int) -> list[weights.Bucket]:
        """Return how the weights, as they are served, are divided for ``gather_weights``. No collective."""
        return weights.plan(self._model.decoder, self._dtype, max_bytes=max_bytes)

    def gather_weights(
        self,
        buckets: Sequence[weights.Bucket],
        *,
        send: Callable[[Tensor], None] | None = None,
        into: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return copies of the weights, as they are served, on the CPU of rank 0; nothing elsewhere.

        Args:
            send: takes each bucket's bytes on rank 0's device. It may block, shorter than a collective may take.
            into: as of ``weights.gather``.
        """
        return weights.gather(self._model.decoder, buckets, self.dims.all, send=send, into=into)

    def plan_adapter(self) -> list[weights.Bucket]:
        """Return the adapters alone, as they are served, for ``gather_weights``. No collective."""
        return weights.plan(self._model.decoder, self._dtype, of_adapters=True)

    def write_adapter(self, tensors: dict[str, Tensor], directory: Path) -> dict[str, str]:
        """Write gathered adapters as a folder of PEFT's, atomically; return {file: sha256}. Rank 0's alone."""
        return lora.write(tensors, directory, settings=self._trainer.lora, base=self._path)

    def adapter_witnesses(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Return hashes that prove that a server runs these adapters, merged into this base."""
        return self._base_sha256 | weights.adapter_witnesses(tensors)

    def export(self, directory: Path) -> None:
        """Write what was trained: ``model``, a Hugging Face folder, and where adapters were, ``adapter`` beside it."""
        super().export(directory)
        if self._adapters is not None:
            tensors = self.gather_weights(self.plan_adapter())
            if self.dims.all.rank == 0:
                self.write_adapter(tensors, directory / "adapter")

    def base_logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return ``logprobs`` by the model that training started from, which the adapters leave as it is."""
        with lora.without_adapters(self._model.decoder):
            return self.logprobs(rows)

    @property
    def trained(self) -> TrainState:
        """What a checkpoint holds of this engine: of a policy with adapters, those alone. No collective."""
        return super().trained if self._adapters is None else TrainState(self._adapters, self._optimizer)

    def check_base(self, directory: Path) -> None:
        """Make sure that adapters loaded from ``directory`` are of this base (``AdapterState``). No collective."""
        if self._adapters is not None:
            self._adapters.check_base(directory)

    def _packed_logprobs(self, minibatch: Sequence[PackedRow]) -> list[Tensor]:
        return [logprobs_S for logprobs_S, _ in self._execution.infer(minibatch)]

    @property
    def _is_loglinear(self) -> bool:
        return isinstance(self._objective, PolicyLoss) and self._objective.is_loglinear

    def _kept(self, minibatch: Sequence[PackedRow]) -> list[Tensor] | None:
        """Return which tokens M2PO keeps, row by row: its threshold speaks of all tokens of the mini-batch at once."""
        threshold = self._objective.m2_threshold if isinstance(self._objective, PolicyLoss) else None
        if threshold is None:
            return None
        squares_S = [
            (logprobs_S - row.behave_S).double().square()
            for logprobs_S, row in zip(self._packed_logprobs(minibatch), minibatch, strict=True)
        ]
        trained = [squares[row.mask_S] for squares, row in zip(squares_S, minibatch, strict=True)]
        cutoff = second_moment_cutoff(self._of_all_ranks(torch.cat(trained)), threshold=threshold)
        return [squares < cutoff for squares in squares_S]

    def _of_all_ranks(self, values_N: Tensor) -> Tensor:
        """Return the values of every rank, of which each may hold another number."""
        ranks = self.dims.data
        if ranks.size == 1:
            return values_N
        most = ranks.largest(len(values_N))
        padded = torch.cat([values_N, values_N.new_full((most - len(values_N),), math.nan)])
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
        dist.all_gather(parts, padded, group=ranks.tensors)
        every = torch.cat(parts)
        return every[~every.isnan()]


def _given_starts(minibatch: Iterable[PackedRow]) -> list[Tensor]:
    return [row.columns_S[START] for row in minibatch]


class ReferenceEngine(ModelEngine[Scores]):
    """A frozen policy sharded over the ranks. It has no optimizer, and its parameters take no more than served ones."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        """Load the reference that ``model`` names."""
        super().__init__(
            functools.partial(load_policy, is_frozen=True),
            model=settings.model.for_role("reference"),
            trainer=settings.trainer.for_role("reference"),
            ranks=ranks,
        )

    def base_logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss; 0 elsewhere [L]. A collective."""
        return self._infer(rows, lambda packed: [logprobs_S for logprobs_S, _ in self._execution.infer(packed)])
