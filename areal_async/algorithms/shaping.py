"""Rewards that look at an answer's length or form. Pure, without torch.

The functions are offered to users: a workflow adds what they return to its reward. ``Overlong`` is the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """Soft overlong punishment: nothing up to ``max_tokens - cache_tokens``, then a line down to -``factor``.

    ``R(n) = 0`` for ``n <= L_max - L_cache``, ``((L_max - L_cache) - n) / L_cache`` up to ``L_max``, ``-1`` beyond.

    Source: DAPO, arXiv 2503.14476 eq. 13, with L_max = 20,480 and L_cache = 4,096.
    """

    max_tokens: int
    """L_max."""
    cache_tokens: int
    """L_cache, at most L_max."""
    factor: float = 1.0
    """The paper's is 1."""

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ValueError(
                f"overlong: got a cache of {self.cache_tokens} tokens, need 1 to {self.max_tokens}, the longest answer"
            )

    def penalty(self, num_tokens: int) -> float:
        """Return what is added to the reward of an answer of this length: 0 to -``factor``."""
        over = num_tokens - (self.max_tokens - self.cache_tokens)
        return -self.factor * min(max(over / self.cache_tokens, 0.0), 1.0)


def length_rewards(num_tokens_G: Sequence[int], is_correct_G: Sequence[bool]) -> NDArray[np.float64]:
    """Return what is added to each sibling's reward so that, of right answers, the shorter is better [G].

    ``lambda = 0.5 - (n - n_min) / (n_max - n_min)`` over the siblings; a right answer gets lambda, a wrong one
    min(0, lambda); all get 0 where all have one length.

    Source: Kimi k1.5, arXiv 2501.12599, its length penalty.
    """
    num_tokens = np.asarray(num_tokens_G, dtype=np.float64)
    if not num_tokens.size or num_tokens.min() == num_tokens.max():
        return np.zeros(num_tokens.shape)
    value_G: NDArray[np.float64] = 0.5 - (num_tokens - num_tokens.min()) / (num_tokens.max() - num_tokens.min())
    return np.where(np.asarray(is_correct_G, dtype=np.bool_), value_G, np.minimum(value_G, 0.0))


def budget_reward(
    num_tokens: int, is_correct: bool, *, target: int, alpha: float = 0.0003, delta: float = 0.5
) -> float:
    """Return ``correct * clip(alpha * (target - n) + delta, 0, 1)``: right, and within a budget of tokens.

    Source: L1-Max, arXiv 2503.04697; ``alpha`` and ``delta`` are its own.
    """
    return float(is_correct) * min(max(alpha * (target - num_tokens) + delta, 0.0), 1.0)


def format_shaped(reward: float, is_formatted: bool, *, bonus: float = 0.0, penalty: float = 0.0) -> float:
    """Return the reward with a bonus for an answer in the wanted form, or a penalty for another.

    Source: the sum of an accuracy and a format reward, as in DeepSeek-R1, arXiv 2501.12948; the sizes are the user's.
    """
    return reward + (bonus if is_formatted else -penalty)
