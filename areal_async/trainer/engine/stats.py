"""What a training step reports, and how it is added up over rows, updates and ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from areal_async.algorithms.objective import LossTerms
from areal_async.algorithms.policy import gap_name
from areal_async.protocol.types import mean
from areal_async.trainer.engine.gradient_groups import GROUPS, KINDS
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import PackedRow


def share(sums: Mapping[str, float], name: str, *, of: str = "tokens") -> float:
    """Return one sum for each of another; 0 for none."""
    count = sums.get(of, 0.0)
    return sums.get(name, 0.0) / count if count else 0.0


def _share(name: str, *, of: str = "tokens") -> Any:
    """Declare a number of ``StepStats`` as a share of these sums."""
    return field(metadata={"share": {"name": name, "of": of}})


def _largest(name: str) -> Any:
    """Declare a number of ``StepStats`` as the maximum of this name; 0 for none."""
    return field(metadata={"largest": name})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What one training step did. Equal on every rank; means are over the trained tokens of all ranks.

    What the objective does not report (a likelihood has no ratio) is 0.
    """

    loss: float = _share("loss", of="units")
    """The loss as it is aggregated: a mean over tokens, or over sequences."""
    grad_norm: float
    """Norm of the gradient before clipping; the mean over the step's updates."""
    grad_norm_embeddings: float
    """The same of parts of the model (``gradient_groups``); 0 where it has none."""
    grad_norm_attention: float
    grad_norm_mlp: float
    grad_norm_norms: float
    grad_norm_head: float
    """0 where the head is the embeddings."""
    grad_norm_other: float
    grad_norm_layers_first: float
    """Norm of the first third of the decoder's layers; the next two are of the others."""
    grad_norm_layers_middle: float
    grad_norm_layers_last: float
    entropy_mean: float = _share("entropy")
    logprob_gap_mean: float = _share("current_gap", of="current")
    """Mean |trainer - server| logprob over tokens of the step's start version, by the step's start weights.

    Steered tokens, whose server's logprob is of another distribution, are not among them. 0 where there are none
    (``num_current_tokens``): a queue that is always full holds older tokens alone.
    """
    num_current_tokens: int
    """Tokens of the step's start version, without steered ones."""
    logprob_gap_all_mean: float = _share("gap")
    """Mean |trainer - server| logprob over all trained tokens, stale and steered ones included."""
    logprob_gap_max: float = _largest("current_gap")
    """Largest |trainer - server| logprob, in nats, over tokens of the start version."""
    logprob_gap_over_0_001: float = _share(gap_name(0.001), of="current")
    """Share of the tokens of the start version whose gap is larger, in nats: with the next three its histogram."""
    logprob_gap_over_0_01: float = _share(gap_name(0.01), of="current")
    logprob_gap_over_0_1: float = _share(gap_name(0.1), of="current")
    logprob_gap_over_1: float = _share(gap_name(1.0), of="current")
    behave_kl_mean: float = _share("behave_kl")
    """Estimated KL divergence from the policy that sampled to the step's start, over all trained tokens (k3)."""
    ratio_max_deviation: float = _largest("current_ratio_deviation")
    """Largest |exp(trainer - server) - 1| over tokens of the start version."""
    ratio_mean: float = _share("ratio")
    """Mean of the importance ratio that is clipped."""
    ratio_max: float = _largest("ratio")
    clip_fraction: float = _share("clipped")
    """Share of tokens at which the clip, a mask or the bound on a ratio (``ratios``) acted."""
    clip_fraction_lower: float = _share("clipped_lower")
    """Share of tokens that were clipped with a ratio under 1."""
    clip_fraction_upper: float
    """Share of tokens that were clipped with a ratio over 1."""
    behave_weight_mean: float = _share("behave_weight")
    behave_weight_max: float = _largest("behave_weight")
    kl_mean: float = _share("kl")
    """Estimated distance to the reference model, where it is a part of the loss or of the reward."""
    num_tokens: int
    """Trained tokens, each counted once."""
    lr: float
    num_updates: int
    num_skipped: int
    """Updates left out because the gradient or the loss was not finite; not among ``num_updates``, and their tokens
    are in no mean."""
    num_skipped_loss: int
    """Updates left out because the loss was not finite; they are among ``num_skipped``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update, made or skipped. Equal on every rank."""

    grad_norm: float
    """Before clipping."""
    by_group: Mapping[str, float]
    """The norm of each of ``GROUPS``."""
    has_finite_loss: bool = True

    @classmethod
    def of(cls, squares: Mapping[str, float], *, has_finite_loss: bool) -> Self:
        """Take squares of norms by group, over all ranks; the kinds among them make up the whole."""
        by_group = {name: math.sqrt(square) for name, square in squares.items()}
        whole = math.sqrt(sum(squares[kind] for kind in KINDS))
        return cls(grad_norm=whole, by_group=by_group, has_finite_loss=has_finite_loss)

    @property
    def is_made(self) -> bool:
        """Whether everything is finite; else the weights stay as they are."""
        return self.has_finite_loss and math.isfinite(self.grad_norm)


@dataclass(kw_only=True, slots=True)
class Tally:
    """The running sums and maxima of one step on one rank."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        """Updates whose gradient or loss was not finite."""
        return sum(not update.is_made for update in self.updates)

    def add_update(self, update: Update, terms: Sequence[LossTerms], rows: Sequence[PackedRow]) -> None:
        """Take in one update and, where it was made, what the objective says of its rows.

        One that was skipped taught nothing, and its numbers, some of them not finite, would spoil those of the others.
        """
        self.updates.append(update)
        for one, row in zip(terms, rows, strict=True):
            sums = {"loss": one.loss.detach(), "tokens": row.mask_S.sum(), "units": row.units_S.sum(), **one.sums}
            # Every rank brings the same names, whatever it counts: they are added up by place.
            for name, value in sums.items():
                seen = self.sums.get(name, torch.zeros((), dtype=torch.float64, device=value.device))
                self.sums[name] = seen + value.double() if update.is_made else seen
            for name, value in one.maxima.items():
                most = self.maxima.get(name, torch.zeros_like(value))
                self.maxima[name] = torch.maximum(most, value) if update.is_made else most

    @property
    def grad_norm(self) -> float:
        """Mean norm of the gradients of the updates that were made, 0 for none."""
        return mean([update.grad_norm for update in self.updates if update.is_made])

    def group_norm(self, name: str) -> float:
        """Return the mean gradient norm of one of ``GROUPS`` over the updates that were made."""
        return mean([update.by_group.get(name, 0.0) for update in self.updates if update.is_made])

    def totals(self, ranks: Ranks) -> dict[str, float]:
        """Return the sums over all ranks. A collective."""
        # Every rank saw as many rows as the others, so the names and their order agree.
        return _reduced(self.sums, ranks, dist.ReduceOp.SUM)

    def stats(self, ranks: Ranks, *, lr: float) -> StepStats:
        """Add up over the ranks. A collective, of two small reductions."""
        sums = self.totals(ranks)
        maxima = _reduced(self.maxima, ranks, dist.ReduceOp.MAX)
        declared = {one.name: one.metadata for one in fields(StepStats)}
        shares = {name: share(sums, **data["share"]) for name, data in declared.items() if "share" in data}
        return StepStats(
            **shares,
            **{name: maxima.get(data["largest"], 0.0) for name, data in declared.items() if "largest" in data},
            grad_norm=self.grad_norm,
            **{f"grad_norm_{name}": self.group_norm(name) for name in GROUPS},
            num_current_tokens=int(sums.get("current", 0.0)),
            clip_fraction_upper=shares["clip_fraction"] - shares["clip_fraction_lower"],
            num_tokens=int(sums.get("tokens", 0.0)),
            lr=lr,
            num_updates=len(self.updates) - self.num_skipped,
            num_skipped=self.num_skipped,
            num_skipped_loss=sum(not update.has_finite_loss for update in self.updates),
        )


def _reduced(values: dict[str, Tensor], ranks: Ranks, op: "dist.ReduceOp.RedOpType") -> dict[str, float]:
    if not values:
        return {}
    reduced = ranks.reduce(torch.stack([value.double() for value in values.values()]), op)
    return dict(zip(values, reduced.tolist(), strict=True))
