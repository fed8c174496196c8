"""Advantages: what a reward says beyond what was to be expected of its prompt.

Pure, without torch. Letters: G siblings of a group, K turns of a trajectory, L tokens of a sequence. The arithmetic
is in float64, results are float32 as the loss takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.shaping import Overlong
from areal_async.config.settings import Settings
from areal_async.protocol.types import ReplyReward

STD_EPSILON = 1e-6
"""Added to a standard deviation, so that nearly equal rewards do not explode."""
OVERLONG_SHARE = 5
"""An unset overlong cache is the longest answer by this, as DAPO's 4,096 are of 20,480."""

Baseline = Literal["group", "leave_one_out", "none"]
Spread = Literal["group", "batch", "batch_reward", "none"]
CreditName = Literal["returns", "process", "turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sibling:
    """What an outcome advantage is made of."""

    reward: float
    num_tokens: int = 1
    """Tokens that the policy sampled."""
    credits: tuple[ReplyReward, ...] = ()
    """Rewards of its replies, where it has any (``credit``); ``reward`` is then their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageRule:
    """How the rewards of one training step become advantages: (reward + shaping - baseline) / spread.

    ======================  =============  ============
    paper                   baseline       std
    ======================  =============  ============
    GRPO, DAPO              group          group
    Dr.GRPO                 group          none
    RLOO                    leave_one_out  none
    REINFORCE++             none           batch
    REINFORCE++ baseline    group          batch
    LitePPO                 group          batch_reward
    ======================  =============  ============

    RLOO's ``leave_one_out`` is ``R_i - sum_{j != i} R_j / (n - 1)``, arXiv 2402.14740.
    """

    baseline: Baseline = "group"
    std: Spread = "group"
    overlong: Overlong | None = None
    credit: CreditName = "returns"
    """What the rewards of single replies are (``credit``); the last two know ``baseline="group"`` alone."""
    gamma: float = 1.0
    """Discount of a later turn's reward, of ``credit="turns"``."""


def advantage_rule(settings: Settings) -> AdvantageRule:
    """Return how a step's rewards become advantages, as far as rewards alone say it.

    With a critic they leave the rule as they are, but for their shaping: the rest is ``values.gae``.
    """
    algorithm = settings.algorithm
    longest = algorithm.overlong_max or settings.rollout.sampling.max_new_tokens
    cache = max(1, longest // OVERLONG_SHARE) if algorithm.overlong_cache is None else algorithm.overlong_cache
    overlong = Overlong(max_tokens=longest, cache_tokens=cache, factor=algorithm.overlong_factor) if cache else None
    if algorithm.advantage_baseline == "critic":
        return AdvantageRule(baseline="none", std="none", overlong=overlong)
    return AdvantageRule(
        baseline=algorithm.advantage_baseline,
        std=algorithm.advantage_std,
        overlong=overlong,
        credit=algorithm.credit,
        gamma=algorithm.gamma if algorithm.credit == "turns" else 1.0,
    )


def step_advantages(groups: Sequence[Sequence[Sibling]], rule: AdvantageRule) -> list[NDArray[np.float32]]:
    """Return the advantages of a whole training step, group by group, each [G].

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = [_shaped(siblings, rule.overlong) for siblings in groups]
    centred = [_centred(rewards_G, rule.baseline) for rewards_G in rewards]
    if rule.std == "group":
        centred = [_divided(values_G, _std(rewards_G)) for values_G, rewards_G in zip(centred, rewards, strict=True)]
    elif rule.std == "batch_reward" and centred:
        spread = _std(np.concatenate(rewards))
        centred = [_divided(values_G, spread) for values_G in centred]
    elif rule.std == "batch" and centred:
        weights_N = np.array([sibling.num_tokens for siblings in groups for sibling in siblings], dtype=np.float64)
        whitened_N = whitened(np.concatenate(centred), weights_N)
        centred = np.split(whitened_N, np.cumsum([len(siblings) for siblings in groups])[:-1])
    return [values_G.astype(np.float32) for values_G in centred]


def group_advantages(rewards_G: Sequence[float] | NDArray[np.float64], *, std: bool) -> NDArray[np.float32]:
    """Return each sibling's reward above the mean of its own group [G].

    The group is the real one, however many siblings it has; one whose rewards are all equal (or that has a
    single sibling) teaches nothing and gives exact zeros.

    Args:
        std: also divide by the group's standard deviation (n - 1 below the fraction bar) plus ``STD_EPSILON``.

    Raises:
        ValueError: a reward is not finite.

    Source: GRPO, arXiv 2402.03300 section 4.1.2; without ``std`` Dr.GRPO, arXiv 2503.20783.
    """
    rewards = _finite(rewards_G)
    centred_G = _centred(rewards, "group")
    return (_divided(centred_G, _std(rewards)) if std else centred_G).astype(np.float32)


def whitened(values_N: NDArray[np.float64], weights_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take the weighted mean off and divide by the weighted standard deviation plus ``STD_EPSILON`` [N].

    With token counts as weights these are the mean and the (population) deviation over the tokens of the batch, each
    of which carries the advantage of its sequence. Equal values give exact zeros.

    Source: the global normalisation of REINFORCE++, arXiv 2501.03262.
    """
    if not values_N.size or values_N.min() == values_N.max() or not weights_N.sum():
        return np.zeros(values_N.shape)
    mean = np.average(values_N, weights=weights_N)
    deviation = np.sqrt(np.average((values_N - mean) ** 2, weights=weights_N))
    return np.asarray((values_N - mean) / (deviation + STD_EPSILON))


def is_informative(rewards_G: Sequence[float]) -> bool:
    """Say whether a group's rewards differ; of groups that do not, dynamic sampling trains none.

    Source: DAPO, arXiv 2503.14476 eq. 11, for rewards of any kind.
    """
    return len(set(rewards_G)) > 1


def returns_to_go(rewards_K: Sequence[float], *, gamma: float = 1.0) -> NDArray[np.float64]:
    """Return for each turn its own reward and, discounted, all later ones: ``G_k = r_k + gamma * G_{k+1}`` [K]."""
    returns_K = np.zeros(len(rewards_K))
    running = 0.0
    for turn in reversed(range(len(rewards_K))):
        running = rewards_K[turn] + gamma * running
        returns_K[turn] = running
    return returns_K


def process_advantages(rewards: Sequence[Sequence[float]]) -> list[NDArray[np.float32]]:
    """Return each step's advantage, sibling by sibling, each [K]: the normalised rewards from this step on, added up.

    Mean and standard deviation are those of all steps of the group together, so a step that is better than the
    group's usual one lifts the steps before it too.

    Source: GRPO with process supervision, arXiv 2402.03300 section 4.1.3.
    """
    flat = _finite([reward for sibling in rewards for reward in sibling])
    if flat.size < 2 or flat.min() == flat.max():
        return [np.zeros(len(sibling), dtype=np.float32) for sibling in rewards]
    mean, deviation = flat.mean(), flat.std(ddof=1) + STD_EPSILON
    return [
        returns_to_go([(reward - mean) / deviation for reward in sibling]).astype(np.float32) for sibling in rewards
    ]


def turn_advantages(rewards: Sequence[Sequence[float]], *, gamma: float = 1.0, std: bool) -> list[NDArray[np.float32]]:
    """Return each turn's advantage, sibling by sibling, each [K]: its return against that of the same turn of others.

    The return of turn k is compared as an outcome is (``group_advantages``), among the siblings that have a turn k.
    With one turn each this is GRPO's outcome supervision.

    Args:
        gamma: discount of a later turn's reward.
    """
    returns = [returns_to_go(_finite(sibling).tolist(), gamma=gamma) for sibling in rewards]
    advantages = [np.zeros(len(sibling), dtype=np.float32) for sibling in rewards]
    for turn in range(max((len(sibling) for sibling in rewards), default=0)):
        having = [place for place, sibling in enumerate(rewards) if len(sibling) > turn]
        values = group_advantages([float(returns[place][turn]) for place in having], std=std)
        for place, value in zip(having, values, strict=True):
            advantages[place][turn] = value
    return advantages


def spread_over_tokens(
    values_K: NDArray[np.float32], turn_L: NDArray[np.int64] | NDArray[np.int16]
) -> NDArray[np.float32]:
    """Give each token the value of its turn [L]; 0 where ``turn_L`` is negative, as on prompts and tool results."""
    is_sampled_L = turn_L >= 0
    values_L = np.zeros(turn_L.shape, dtype=np.float32)
    values_L[is_sampled_L] = values_K[turn_L[is_sampled_L]]
    return values_L


def _finite(rewards: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"advantages: got rewards {values.tolist()}, need finite numbers")
    return values


def _shaped(siblings: Sequence[Sibling], overlong: Overlong | None) -> NDArray[np.float64]:
    rewards_G = _finite([sibling.reward for sibling in siblings])
    if overlong is not None:
        rewards_G = rewards_G + [overlong.penalty(sibling.num_tokens) for sibling in siblings]
    return rewards_G


def _centred(rewards_G: NDArray[np.float64], baseline: Baseline) -> NDArray[np.float64]:
    if baseline == "none":
        return rewards_G
    if rewards_G.size < 2 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape)
    centred_G: NDArray[np.float64] = rewards_G - rewards_G.mean()
    if baseline == "leave_one_out":
        # R_i - mean of the others is the deviation from the mean of all, times n / (n - 1).
        centred_G *= rewards_G.size / (rewards_G.size - 1)
    return centred_G


def _std(rewards: NDArray[np.float64]) -> float:
    """Return the sample standard deviation, 0 for fewer than two rewards or equal ones."""
    return float(rewards.std(ddof=1)) if rewards.size > 1 and rewards.min() != rewards.max() else 0.0


def _divided(values: NDArray[np.float64], deviation: float) -> NDArray[np.float64]:
    return values / (deviation + STD_EPSILON) if deviation else np.zeros(values.shape)
