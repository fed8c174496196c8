"""The engine of the critic: what a policy may expect from here on, learned from what it then got.

The invariants are those of ``sharded``. Every public method is a collective, called from one thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import structlog
import torch
from torch import Tensor

from areal_async.algorithms.objective import LossTerms
from areal_async.algorithms.values import value_loss
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.process.hub import local_model
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.checkpoint import TrainState
from areal_async.trainer.engine.model import DTYPES, Sharding, load_critic
from areal_async.trainer.engine.parallel.dims import ParallelDims
from areal_async.trainer.engine.parallel.execution import Execution
from areal_async.trainer.engine.parallel.pipeline import execution_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.sharded import PackedPasses, TrainableModel
from areal_async.trainer.engine.stats import Tally
from areal_async.trainer.packing.flops import DecoderFlops, decoder_flops
from areal_async.trainer.packing.rows import RETURNS, VALUES, PackedRow, TrainRow

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStats:
    """What one training step did to the critic. Equal on every rank; means are over the trained tokens of all."""

    value_loss: float
    """Half the squared error, clipped as the settings say."""
    value_grad_norm: float
    """Before clipping; the mean over the step's updates."""
    value_clip_fraction: float
    """Share of tokens whose error the value clip took over."""
    value_lr: float
    value_num_updates: int
    value_num_skipped: int
    """Updates left out because the gradient or the loss was not finite; not among ``value_num_updates``."""


class CriticEngine:
    """A critic sharded over the ranks (FSDP2), its optimizer and its loss."""

    def __init__(
        self,
        *,
        model: ModelSettings,
        trainer: TrainerSettings,
        ranks: Ranks,
        value_clip: float | None = None,
        num_minibatches: int = 1,
    ) -> None:
        self.dims = ParallelDims.of(ranks, trainer)
        self._value_clip = value_clip
        self._critic = load_critic(
            local_model(model.path),
            self.dims,
            dtype=DTYPES[model.dtype],
            activation_checkpointing=trainer.activation_checkpointing,
            stages_per_rank=trainer.stages_per_rank,
            sharding=Sharding.of(trainer),
        )
        self._execution: Execution[Tensor] = execution_of(self._critic, self.dims, num_outputs=1)
        self.flops: DecoderFlops = decoder_flops(self._critic.classifier)
        self._passes = PackedPasses(
            self.dims.data, token_budget=trainer.token_budget, flops=self.flops, fit=self._execution.fit_rows
        )
        # Each value is an estimate of its own, so its error is a mean over tokens whatever the policy's loss is.
        self._trainable = TrainableModel(
            self._critic,
            execution=self._execution,
            passes=self._passes,
            dims=self.dims,
            trainer=trainer,
            num_minibatches=num_minibatches,
        )

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load the critic that ``model`` names and make the engine that ``algorithm`` and ``trainer`` describe."""
        return cls(
            model=settings.model.for_role("critic"),
            trainer=settings.trainer.for_critic,
            ranks=ranks,
            value_clip=settings.algorithm.value_clip,
            num_minibatches=settings.algorithm.num_minibatches,
        )

    @property
    def vocab_size(self) -> int:
        """Of the model's embedding."""
        return int(cast(Any, self._critic.classifier).config.vocab_size)

    def change(self, settings: Settings) -> None:
        """Take the peak of the learning rate's schedule of these, from the next step on."""
        self._trainable.set_peak(settings.trainer.for_critic.lr)

    def values(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the value before every token in its loss; 0 elsewhere [L]."""
        return self._passes.infer(rows, self._execution.infer)

    def train_step(self, rows: Sequence[TrainRow], *, step: int, total_steps: int) -> CriticStats:
        """Train on this rank's rows, each of which brings ``VALUES`` and ``RETURNS``; ranks may hold none.

        Args:
            step: counts from 1; decides the learning rate.
            total_steps: length of the learning rate's schedule.
        """
        lr = self._trainable.begin(step, total_steps=total_steps)
        tally = Tally()
        for minibatch in self._trainable.minibatches(rows, (VALUES, RETURNS)):
            denominator = self._trainable.denominator(minibatch)
            if denominator:
                self._trainable.update(minibatch, self._loss, tally, denominator=denominator)
        if tally.num_skipped:
            log.warning("critic.skipped", step=step, num_skipped=tally.num_skipped, reason="not finite")
        sums = tally.totals(self.dims.data)
        num_tokens = sums.get("tokens") or 1.0
        return CriticStats(
            value_loss=sums.get("loss", 0.0) / num_tokens,
            value_grad_norm=tally.grad_norm,
            value_clip_fraction=sums.get("value_clipped", 0.0) / num_tokens,
            value_lr=lr,
            value_num_updates=len(tally.updates) - tally.num_skipped,
            value_num_skipped=tally.num_skipped,
        )

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, whole, in float32, on the CPU of rank 0; nothing elsewhere."""
        buckets = weights.plan(self._critic.classifier, torch.float32, max_bytes=0)
        return weights.gather(self._critic.classifier, buckets, self.dims.all)

    def watch_gradients(self, see: Callable[[dict[str, Tensor]], None]) -> None:
        """Have ``see`` called in every update with each parameter's gradient, whole, before clipping, on rank 0's CPU.

        On the other ranks it is called with nothing. The update takes as much longer as gathering the model does.
        """

        def gather() -> None:
            with self._trainable.gradients_as_parameters():
                gradients = self.full_parameters()
            see(gradients)

        self._trainable.on_gradients = gather

    @property
    def trained(self) -> TrainState:
        """What a checkpoint holds of this engine. No collective."""
        return TrainState(self._critic.classifier, self._trainable.optimizer)

    def _loss(self, _number: int, row: PackedRow, values_S: Tensor) -> LossTerms:
        return value_loss(
            values_S,
            row.columns_S[VALUES],
            row.columns_S[RETURNS],
            row.mask_S,
            value_clip=self._value_clip,
            weight_T=row.weights_S,
        )
