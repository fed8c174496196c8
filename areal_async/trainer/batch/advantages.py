"""The one place where advantages are computed: of rewards alone, or with a critic's values or a penalty in addition.

Letters: N trajectories of this rank, T the tokens of their rows laid end to end, L those of one row. All in float64.
Siblings and batches lie across ranks, so some functions are given ``gather``: it takes this rank's bytes and returns
every rank's, and all ranks call it in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.algorithms.advantages import STD_EPSILON, AdvantageRule
from areal_async.algorithms.credit import reply_advantages, sibling_of
from areal_async.algorithms.kl import kl_estimate, kl_rewards, last_token_rewards, sequence_kl
from areal_async.algorithms.values import gae, reward_to_go
from areal_async.config.settings import AlgorithmSettings
from areal_async.trainer.batch.payloads import BatchSlot, by_group
from areal_async.trainer.packing.rows import TrainRow

Columns = list[NDArray[np.float32]]
"""A number per token, row by row, each [L]."""
Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episodes:
    """The trajectories of this rank's rows as one line of tokens."""

    mask_T: Tensor
    episode_T: Tensor
    """Number of each token's trajectory, from 0: its sequences follow one another, and time goes on through them."""
    positions: list[int]
    """Position of each trajectory in the whole batch."""
    lengths: list[int]
    """Number of tokens of each row."""

    @classmethod
    def of(cls, rows: Sequence[TrainRow]) -> Self:
        """Lay rows end to end; those of a trajectory must stand together, in order."""
        positions = list(dict.fromkeys(row.index for row in rows))
        numbers = {position: number for number, position in enumerate(positions)}
        masks = [row.loss_mask for row in rows]
        episodes = np.repeat([numbers[row.index] for row in rows], [row.num_tokens for row in rows])
        return cls(
            mask_T=torch.from_numpy(np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)),
            episode_T=torch.from_numpy(episodes.astype(np.int64)),
            positions=positions,
            lengths=[row.num_tokens for row in rows],
        )

    def joined(self, columns: Sequence[Tensor] | Columns) -> Tensor:
        """Return a number per token, row by row, as one line [T]."""
        parts = [torch.as_tensor(column, dtype=torch.float64) for column in columns]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def parted(self, values_T: Tensor) -> Columns:
        """Undo ``joined``."""
        return [part.float().numpy() for part in values_T.split(self.lengths)] if self.lengths else []

    def rewards(self, outcomes: Mapping[int, float], penalties: Columns | None) -> Tensor:
        """Put each trajectory's outcome on its last trained token, and take each token's penalty off [T]."""
        outcomes_N = torch.tensor([outcomes[position] for position in self.positions], dtype=torch.float64)
        if not len(outcomes_N):
            return torch.zeros(0, dtype=torch.float64)
        rewards_T = last_token_rewards(outcomes_N, self.mask_T, self.episode_T)
        if penalties is None:
            return rewards_T
        return kl_rewards(rewards_T, self.joined(penalties), self.mask_T, kl_coef=1.0)


class Moments(msgspec.Struct):
    """Number, mean and summed squared deviation of some values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values_A: Tensor) -> "Moments":
        """Return the moments of some values; all 0 for no values."""
        if not len(values_A):
            return cls()
        mean = float(values_A.mean())
        return cls(count=len(values_A), mean=mean, squares=float((values_A - mean).square().sum()))

    def joined(self, other: "Moments") -> "Moments":
        """Return the moments of two sets of values together.

        Source: Chan, Golub and LeVeque 1979, eq. 2.1.
        """
        count = self.count + other.count
        if not count:
            return self
        difference = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + difference * other.count / count,
            squares=self.squares + other.squares + difference**2 * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Population variance; 0 for no values."""
        return self.squares / self.count if self.count else 0.0


class Quality(msgspec.Struct):
    """How good a critic is, on the trained tokens of all ranks, before the step trains it."""

    value_mean: float
    returns_mean: float
    explained_variance: float
    """``1 - Var(R - V) / Var(R)``: 1 for a critic that knows the returns, 0 for one that knows their mean."""


def outcome_advantages(
    groups: Sequence[Sequence[BatchSlot]], rule: AdvantageRule, *, penalties: Mapping[int, float] | None = None
) -> dict[int, NDArray[np.float32]]:
    """Return, by position, the advantages [K] of a slot's K credited replies, K = 1 without credits.

    Headers alone decide them, so every rank comes to the same ones.

    Args:
        groups: every group of the batch, with the siblings that train.
        penalties: by position, what comes off the reward of a slot without credits.

    Raises:
        ValueError: a reward is not finite.
    """
    less = penalties or {}
    siblings = [
        [replace(sibling_of(slot.header), reward=slot.header.reward - less.get(slot.position, 0.0)) for slot in group]
        for group in groups
    ]
    return {
        slot.position: values
        for group, advantages in zip(groups, reply_advantages(siblings, rule), strict=True)
        for slot, values in zip(group, advantages, strict=True)
    }


def kl_penalties(
    rows: Sequence[TrainRow],
    logprobs: Sequence[Tensor],
    reference: Sequence[Tensor],
    algorithm: AlgorithmSettings,
    *,
    gather: Gather,
) -> tuple[Columns, float]:
    """Return what each token's distance to the reference takes off its reward, and the mean distance."""
    episodes = Episodes.of(rows)
    logprobs_T, reference_T = episodes.joined(logprobs), episodes.joined(reference)
    kl_T = kl_estimate(logprobs_T, reference_T, episodes.mask_T, estimator=algorithm.kl_estimator)
    mean = _all_moments([kl_T[episodes.mask_T]], gather)[0].mean
    return episodes.parted(algorithm.kl_coef * kl_T), mean


def critic_advantages(
    rows: Sequence[TrainRow],
    outcomes: Mapping[int, float],
    values: Sequence[Tensor],
    penalties: Columns | None,
    algorithm: AlgorithmSettings,
    *,
    gather: Gather,
) -> tuple[Columns, Columns, Quality]:
    """Return advantages (GAE) and returns of every token, and how good the values were.

    Args:
        outcomes: reward by position in the batch.
        algorithm: ``advantage_std="batch"`` whitens advantages over the trained tokens of the whole batch; the returns
            stay in units of reward.
    """
    episodes = Episodes.of(rows)
    values_T, mask_T = episodes.joined(values), episodes.mask_T
    advantages_T, returns_T = gae(
        episodes.rewards(outcomes, penalties),
        values_T,
        mask_T,
        episodes.episode_T,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    of_advantages, of_values, of_returns, of_errors = _all_moments(
        [one[mask_T] for one in (advantages_T, values_T, returns_T, returns_T - values_T)], gather
    )
    if algorithm.advantage_std == "batch":
        advantages_T = _whitened(advantages_T, mask_T, of_advantages)
    is_flat = of_returns.variance == 0
    quality = Quality(
        value_mean=of_values.mean,
        returns_mean=of_returns.mean,
        explained_variance=0.0 if is_flat else 1.0 - of_errors.variance / of_returns.variance,
    )
    return episodes.parted(advantages_T), episodes.parted(returns_T), quality


def penalised_advantages(
    rows: Sequence[TrainRow],
    slots: Sequence[BatchSlot],
    penalties: Columns,
    *,
    rule: AdvantageRule,
    gather: Gather,
) -> Columns:
    """Return every token's advantage when penalties come off the rewards first, without a critic.

    With no baseline but the batch (REINFORCE++), a token has its outcome less the penalties from it on, and these
    are whitened over the batch. Any baseline is taken among siblings, of outcomes less the penalties of all their
    tokens (RLOO).

    Args:
        slots: those of the whole batch, on every rank.

    Source: REINFORCE++, arXiv 2501.03262; RLOO, arXiv 2402.14740.
    """
    episodes = Episodes.of(rows)
    mask_T = episodes.mask_T
    groups = list(by_group(slots).values())
    if rule.baseline == "none" and rule.std in ("batch", "none"):
        shaped = AdvantageRule(baseline="none", std="none", overlong=rule.overlong)
        outcomes = {position: float(values[0]) for position, values in outcome_advantages(groups, shaped).items()}
        advantages_T = reward_to_go(episodes.rewards(outcomes, penalties), mask_T, episodes.episode_T)
        if rule.std == "batch":
            advantages_T = _whitened(advantages_T, mask_T, _all_moments([advantages_T[mask_T]], gather)[0])
        return episodes.parted(advantages_T)
    sums_T = sequence_kl(episodes.joined(penalties), mask_T, episodes.episode_T)
    own = {position: float(sums_T[number]) for number, position in enumerate(episodes.positions)}
    every: dict[int, float] = {}
    for part in gather(msgspec.msgpack.encode(own)):
        every |= msgspec.msgpack.decode(part, type=dict[int, float])
    advantages = outcome_advantages(groups, rule, penalties=every)
    return [np.full(row.num_tokens, advantages[row.index][0], dtype=np.float32) for row in rows]


def _whitened(values_T: Tensor, mask_T: Tensor, moments: Moments) -> Tensor:
    """Take the mean off and divide by the deviation; 0 outside the mask, and everywhere for equal values."""
    if moments.variance == 0:
        return torch.zeros_like(values_T)
    whitened_T = (values_T - moments.mean) / (moments.variance**0.5 + STD_EPSILON)
    return torch.where(mask_T, whitened_T, torch.zeros_like(whitened_T))


def _all_moments(values: Sequence[Tensor], gather: Gather) -> list[Moments]:
    """Return the moments over all ranks of several lists of values."""
    own = msgspec.msgpack.encode([Moments.of(one) for one in values])
    parts = [msgspec.msgpack.decode(part, type=list[Moments]) for part in gather(own)]
    every = [Moments() for _ in values]
    for part in parts:
        every = [one.joined(other) for one, other in zip(every, part, strict=True)]
    return every
