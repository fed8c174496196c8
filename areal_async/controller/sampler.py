"""The order in which prompts are visited: endless sequences of seeded permutations, one per epoch.

Pure: position in the sequence is all the state there is, so a restarted controller goes on exactly where
the ``admitted`` record says. Each prompt has one admission per epoch, and epochs follow without a barrier.

Tasks of equal ratios are one pool, whose rows are shuffled together. Tasks of different ratios are a pool each, with
epochs of its own, and take turns (``Turns``).
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_async.types import GroupId

MAX_PERIOD = 1 << 16
"""Turns after which their order repeats, at the most: shares are exact to one part in so many."""


class Share(NamedTuple):
    """What a task asks for."""

    num_rows: int
    ratio: float = 1.0
    """How often each of its rows is visited, compared with those of other tasks."""


class Pool(NamedTuple):
    """Rows that have their epochs together."""

    first_index: int
    num_rows: int

    def holds(self, index: int) -> bool:
        """Say whether a row is one of them."""
        return self.first_index <= index < self.first_index + self.num_rows


class Sampler:
    """Permutations of ``num_rows`` rows under a seed."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self.num_rows = num_rows
        self._seed = seed

    @property
    def pools(self) -> Sequence[Pool]:
        """All rows, in the order of their indices."""
        return (Pool(0, self.num_rows),)

    def group_at(self, position: int) -> GroupId:
        """Return the first attempt at the prompt that is visited at ``position`` (from 0)."""
        epoch, offset = divmod(position, self.num_rows)
        index = int(_permutation(self.num_rows, (self._seed, epoch))[offset])
        return GroupId(epoch=epoch, index=index, attempt=0)


class MixedSampler(Sampler):
    """Several tasks with epochs of their own, which take turns in proportion to their shares."""

    def __init__(self, shares: Sequence[Share], *, seed: int) -> None:
        super().__init__(sum(share.num_rows for share in shares), seed=seed)
        firsts = np.cumsum([0, *(share.num_rows for share in shares)]).tolist()
        self._pools = [Pool(first, share.num_rows) for first, share in zip(firsts, shares, strict=False)]
        self._turns = Turns(whole_weights(shares))

    @property
    def pools(self) -> Sequence[Pool]:
        return self._pools

    def group_at(self, position: int) -> GroupId:
        task, count = self._turns.at(position)
        pool = self._pools[task]
        epoch, offset = divmod(count, pool.num_rows)
        index = pool.first_index + int(_permutation(pool.num_rows, (self._seed, epoch, task))[offset])
        return GroupId(epoch=epoch, index=index, attempt=0)


def sampler_of(shares: Sequence[Share], *, seed: int) -> Sampler:
    """Return the order in which the tasks' rows are visited; each task must have a row."""
    if len({share.ratio for share in shares}) > 1:
        return MixedSampler(shares, seed=seed)
    return Sampler(sum(share.num_rows for share in shares), seed=seed)


class Turns:
    """Whose turn it is. Invariant: after any number of turns, each has had within one of its share of them.

    The order repeats, so a position far out costs no more than a near one.

    Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): of those that are far enough
    behind their share, the one that would be too far behind first.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """``weights``: two or more, above 0; they add up to the period."""
        self._weights = weights
        self._period = period = sum(weights)
        self._of_turn: list[tuple[int, int]] = []
        slack = 2 * len(weights) - 2
        scales = [math.lcm(*weights) // weight for weight in weights]
        counts = [0] * len(weights)
        for turn in range(1, period + 1):
            behind = [turn * weight - count * period for weight, count in zip(weights, counts, strict=True)]
            eligible = [one for one in range(len(weights)) if slack * behind[one] >= period]
            chosen = min(eligible, key=lambda one: ((slack - 1) * period - slack * behind[one]) * scales[one])
            self._of_turn.append((chosen, counts[chosen]))
            counts[chosen] += 1

    def at(self, position: int) -> tuple[int, int]:
        """Return who has the turn at ``position`` (from 0), and how many it has had before."""
        rounds, turn = divmod(position, self._period)
        chosen, count = self._of_turn[turn]
        return chosen, rounds * self._weights[chosen] + count


def whole_weights(shares: Sequence[Share]) -> list[int]:
    """Return whole numbers in proportion to ratio times rows, as small as they can be, and ``MAX_PERIOD`` in all."""
    exact = [Fraction(str(share.ratio)) * share.num_rows for share in shares]
    common = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * common) for one in exact]
    whole = [one // math.gcd(*whole) for one in whole]
    total = sum(whole)
    return whole if total <= MAX_PERIOD else [max(1, one * MAX_PERIOD // total) for one in whole]


@lru_cache(maxsize=512)
def _permutation(num_rows: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    return np.random.default_rng(list(seed)).permutation(num_rows)
