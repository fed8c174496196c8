"""The engine of the critic: what a policy may expect from here on, learned from what it then got.

The invariants are those of ``sharded``. Every public method is a collective, called from one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from areal_async.algorithms.objective import LossTerms
from areal_async.algorithms.values import value_loss
from areal_async.config.settings import Settings
from areal_async.trainer.engine.model import load_critic
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.sharded import TrainedEngine
from areal_async.trainer.engine.stats import share
from areal_async.trainer.packing.rows import RETURNS, VALUES, PackedRow, TrainRow


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStats:
    """What one training step did to the critic. Equal on every rank; means are over the trained tokens of all."""

    value_loss: float
    """Half the squared error, clipped as the settings say."""
    value_grad_norm: float
    """Norm of the gradient before clipping; the mean over the step's updates."""
    value_clip_fraction: float
    """Share of tokens whose error the value clip took over."""
    value_lr: float
    """Learning rate of the step."""
    value_num_updates: int
    """Optimizer updates that were made."""
    value_num_skipped: int
    """Updates left out because the gradient or the loss was not finite; not among ``value_num_updates``."""


class CriticEngine(TrainedEngine[Tensor]):
    """A critic sharded over the ranks (FSDP2), its optimizer and its loss."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        """Load the critic that ``model`` names and make the engine that ``algorithm`` and ``trainer`` describe."""
        # Each value is an estimate of its own, so its error is a mean over tokens whatever the policy's loss is.
        super().__init__(
            load_critic,
            model=settings.model.for_role("critic"),
            trainer=settings.trainer.for_role("critic"),
            ranks=ranks,
            num_minibatches=settings.algorithm.num_minibatches,
        )
        self._value_clip = settings.algorithm.value_clip

    def change(self, settings: Settings) -> None:
        """Take the peak of the learning rate's schedule of these, from the next step on."""
        self._set_peak(settings.trainer.for_role("critic").lr)

    def values(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the value before every token in its loss; 0 elsewhere [L]."""
        return self._infer(rows, self._execution.infer)

    def train_step(self, rows: Sequence[TrainRow], *, step: int, total_steps: int) -> CriticStats:
        """Train on this rank's rows, each of which brings ``VALUES`` and ``RETURNS``; ranks may hold none.

        Args:
            step: counts from 1; decides the learning rate.
            total_steps: length of the learning rate's schedule.
        """
        lr = self._begin(step, total_steps=total_steps)
        minibatches = self._minibatches(rows, (VALUES, RETURNS))
        tally = self._update_with(minibatches, lambda _: self._loss, step=step, event="critic.skipped")
        sums = tally.totals(self.dims.data)
        return CriticStats(
            value_loss=share(sums, "loss"),
            value_grad_norm=tally.grad_norm,
            value_clip_fraction=share(sums, "value_clipped"),
            value_lr=lr,
            value_num_updates=len(tally.updates) - tally.num_skipped,
            value_num_skipped=tally.num_skipped,
        )

    def _loss(self, _number: int, row: PackedRow, values_S: Tensor) -> LossTerms:
        return value_loss(
            values_S,
            row.columns_S[VALUES],
            row.columns_S[RETURNS],
            row.mask_S,
            value_clip=self._value_clip,
            weight_T=row.weights_S,
        )
