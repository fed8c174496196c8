"""What a training step reports, and how it is added up over rows, updates and ranks."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from areal_async.algorithms.objective import LossTerms
from areal_async.trainer.distributed import Ranks
from areal_async.trainer.rows import PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What one training step did. Equal on every rank; means are over the trained tokens of all ranks.

    What the objective does not report (a likelihood has no ratio) is 0.
    """

    loss: float
    """As it is aggregated: a mean over tokens, or over sequences."""
    grad_norm: float
    """Before clipping; the mean over the step's updates."""
    entropy_mean: float
    logprob_gap_mean: float
    """Mean |trainer - server| logprob over tokens of the step's start version, by the step's start weights.

    0 where there are none (``num_current_tokens``): a queue that is always full holds older tokens alone.
    """
    num_current_tokens: int
    """Tokens of the step's start version."""
    logprob_gap_all_mean: float
    """The same over all trained tokens, stale ones included."""
    logprob_gap_max: float
    """Largest one over tokens of the start version."""
    ratio_max_deviation: float
    """Largest |exp(trainer - server) - 1| over tokens of the start version."""
    ratio_mean: float
    """Of the importance ratio that is clipped."""
    ratio_max: float
    clip_fraction: float
    """Share of tokens whose gradient the clip took away."""
    behave_weight_mean: float
    behave_weight_max: float
    kl_mean: float
    """Estimated distance to the reference model, where it is a part of the loss or of the reward."""
    num_tokens: int
    """Trained ones, each counted once."""
    lr: float
    num_updates: int
    num_skipped: int
    """Updates left out because the gradient was not finite; not among ``num_updates``."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """The running sums and maxima of one step on one rank."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        """Updates whose gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.grad_norms)

    def add(self, terms: LossTerms, row: PackedRow) -> None:
        """Take in what the objective says of one row."""
        sums = {"loss": terms.loss.detach(), "tokens": row.mask_S.sum(), "units": row.units_S.sum(), **terms.sums}
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()
        for name, value in terms.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def add_update(self, grad_norm: float) -> None:
        """Take in the gradient norm of one update, made or skipped."""
        self.grad_norms.append(grad_norm)

    @property
    def grad_norm(self) -> float:
        """Mean over the updates, 0 for none."""
        return sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else 0.0

    def totals(self, ranks: Ranks) -> dict[str, float]:
        """Return the sums over all ranks. A collective."""
        # Every rank saw as many rows as the others, so the names and their order agree.
        return _reduced(self.sums, ranks, dist.ReduceOp.SUM)

    def stats(self, ranks: Ranks, *, lr: float) -> StepStats:
        """Add up over the ranks. A collective, of two small reductions."""
        sums = self.totals(ranks)
        maxima = _reduced(self.maxima, ranks, dist.ReduceOp.MAX)
        num_tokens = sums.get("tokens", 0.0)

        def mean(name: str, count: float = num_tokens) -> float:
            return sums.get(name, 0.0) / count if count else 0.0

        return StepStats(
            loss=mean("loss", sums.get("units", 0.0)),
            grad_norm=self.grad_norm,
            entropy_mean=mean("entropy"),
            logprob_gap_mean=mean("current_gap", sums.get("current", 0.0)),
            num_current_tokens=int(sums.get("current", 0.0)),
            logprob_gap_all_mean=mean("gap"),
            logprob_gap_max=maxima.get("current_gap", 0.0),
            ratio_max_deviation=maxima.get("current_ratio_deviation", 0.0),
            ratio_mean=mean("ratio"),
            ratio_max=maxima.get("ratio", 0.0),
            clip_fraction=mean("clipped"),
            behave_weight_mean=mean("behave_weight"),
            behave_weight_max=maxima.get("behave_weight", 0.0),
            kl_mean=mean("kl"),
            num_tokens=int(num_tokens),
            lr=lr,
            num_updates=len(self.grad_norms) - self.num_skipped,
            num_skipped=self.num_skipped,
        )


def _reduced(values: dict[str, Tensor], ranks: Ranks, op: "dist.ReduceOp.RedOpType") -> dict[str, float]:
    if not values:
        return {}
    reduced = ranks.reduce(torch.stack([value.double() for value in values.values()]), op)
    return dict(zip(values, reduced.tolist(), strict=True))
