"""Advantages: what a reward says beyond what was to be expected of its prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that nearly equal rewards do not explode."""


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
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"advantages: got rewards {rewards.tolist()}, need finite numbers")
    if rewards.size < 2 or rewards.min() == rewards.max():
        return np.zeros(rewards.shape, dtype=np.float32)
    centred = rewards - rewards.mean()
    if std:
        centred /= rewards.std(ddof=1) + STD_EPSILON
    advantages_G: NDArray[np.float32] = centred.astype(np.float32)
    return advantages_G
