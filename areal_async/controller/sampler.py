"""The order in which prompts are visited: endless sequences of seeded permutations, one per epoch.

Pure: the ``admitted`` record is all the state there is, so a restarted controller goes on exactly where it says. Each
prompt has one admission per epoch, and epochs follow without a barrier.

Where there are several tasks, each is a pool with epochs of its own, and they take turns (``Turns``) by the mix that
stands in the record for a position. What a task has next depends on how often it had its turn and on nothing else, so
another mix from some position on leaves no prompt out and repeats none.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_async.protocol.types import Admitted, GroupId, Mix

MAX_PERIOD = 1 << 16
"""Turns after which their order repeats, at the most: shares are exact to one part in so many."""


class TaskShare(NamedTuple):
    """What a task asks for."""

    num_rows: int
    ratio: float = 1.0
    """How often each of its rows is visited, compared with those of other tasks; 0 for not at all."""


class RowPool(NamedTuple):
    """Rows that have their epochs together."""

    first_index: int
    num_rows: int

    def holds(self, index: int) -> bool:
        """Say whether a row is one of them."""
        return self.first_index <= index < self.first_index + self.num_rows


class Sampler:
    """Permutations of ``num_rows`` rows under a seed: one pool, whose turn it always is."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self.num_rows = num_rows
        self.pools = [RowPool(0, num_rows)]
        """All rows, in the order of their indices."""
        self._seed = seed
        self._given = Mix(start=0, weights=[1], counts=[0])

    def group_at(self, position: int, mixes: Sequence[Mix] = ()) -> GroupId:
        """Return the first attempt at the prompt that is visited at ``position`` (from 0).

        Args:
            mixes: those on record, the first of which must decide about the position or about one before it.
        """
        mix = self.mix_at(position, mixes)
        task, count = turns_of(mix).at(position - mix.start)
        return self._visit(task, mix.counts[task] + count)

    def is_among_first(self, group: GroupId, num_positions: int, mixes: Sequence[Mix] = ()) -> bool:
        """Say whether the first positions have a prompt's visit in its epoch, without a look at each of them."""
        task, pool = self.pool_of(group)
        mix = self.mix_at(num_positions, mixes)
        had = mix.counts[task] + turns_of(mix).counts(num_positions - mix.start)[task]
        num_visited = had - group.epoch * pool.num_rows
        if not 0 < num_visited < pool.num_rows:
            return num_visited > 0  # no order is made for an epoch far out that somebody names
        return int(_places(pool.num_rows, self._seeds(group.epoch, task))[group.index - pool.first_index]) < num_visited

    def first_groups(self, num_positions: int, mixes: Sequence[Mix] = ()) -> Iterator[GroupId]:
        """Yield what is visited at the first positions; of those that no mix on record decides about, task by task."""
        first = (mixes or [self._given])[0]
        for task, count in enumerate(first.counts):
            yield from (self._visit(task, number) for number in range(count))
        for position in range(first.start, num_positions):
            yield self.group_at(position, mixes)

    def pool_of(self, group: GroupId) -> tuple[int, RowPool]:
        """Return the number and the rows of the pool that a prompt is from."""
        return next((task, pool) for task, pool in enumerate(self.pools) if pool.holds(group.index))

    def mix_at(self, position: int, mixes: Sequence[Mix]) -> Mix:
        """Return the mix that decides about a position."""
        return next(mix for mix in reversed(mixes or [self._given]) if mix.start <= position)

    def _visit(self, task: int, count: int) -> GroupId:
        """Return what a task has when it has had its turn ``count`` times before."""
        pool = self.pools[task]
        epoch, offset = divmod(count, pool.num_rows)
        index = pool.first_index + int(_permutation(pool.num_rows, self._seeds(epoch, task))[offset])
        return GroupId(epoch=epoch, index=index, attempt=0)

    def _seeds(self, epoch: int, task: int) -> tuple[int, ...]:
        return self._seed, epoch


class MixedSampler(Sampler):
    """Several tasks with epochs of their own, which take turns in proportion to their shares."""

    def __init__(self, shares: Sequence[TaskShare], *, seed: int) -> None:
        """``shares``: those of a run that has no mix on record."""
        super().__init__(sum(share.num_rows for share in shares), seed=seed)
        firsts = np.cumsum([0, *(share.num_rows for share in shares)]).tolist()
        self.pools = [RowPool(first, share.num_rows) for first, share in zip(firsts, shares, strict=False)]
        self._given = Mix(start=0, weights=whole_weights(shares), counts=[0] * len(shares))

    def shares_at(self, position: int, mixes: Sequence[Mix]) -> list[float]:
        """Return which part of the visits each task has at a position."""
        weights = self.mix_at(position, mixes).weights
        return [weight / sum(weights) for weight in weights]

    def remixed(self, mixes: Sequence[Mix], weights: Sequence[int], *, now: int, start: int) -> list[Mix]:
        """Return the mixes that are to be on record for tasks to take turns by ``weights`` from ``start`` on.

        Args:
            now: the position that the record has come to; mixes that have no say beyond it are left out.
        """
        last = self.mix_at(start, mixes)
        had = zip(last.counts, turns_of(last).counts(start - last.start), strict=True)
        made = [mix for mix in mixes or [self._given] if mix.start < start]
        if not made or made[-1].weights != list(weights):
            made.append(Mix(start=start, weights=list(weights), counts=[before + since for before, since in had]))
        return [mix for mix, after in zip(made, [*made[1:], None], strict=True) if after is None or after.start > now]

    def _seeds(self, epoch: int, task: int) -> tuple[int, ...]:
        return self._seed, epoch, task


def sampler_of(shares: Sequence[TaskShare], *, seed: int, admitted: Admitted | None = None) -> Sampler:
    """Return the order in which the tasks' rows are visited; each task must have a row.

    Args:
        admitted: the run's record. Without a mix the rows of tasks of equal ratios are one pool, and stay it.
    """
    if len(shares) > 1 and not (is_without_mix(admitted) and len({share.ratio for share in shares}) == 1):
        return MixedSampler(shares, seed=seed)
    return Sampler(sum(share.num_rows for share in shares), seed=seed)


def is_without_mix(admitted: Admitted | None) -> bool:
    """Say whether a run admitted its prompts before every task had epochs of its own.

    Where it has several tasks, the order of what was admitted follows from the ratios that it was given.
    """
    return admitted is not None and admitted.num_fresh > 0 and not admitted.mixes


class Turns:
    """Whose turn it is. Invariant: after any number of turns, each has had within one of its share of them.

    The order repeats, so a position far out costs no more than a near one.

    Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): of those that are far enough
    behind their share, the one that would be too far behind first.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """``weights``: one of them above 0; they add up to the period."""
        self._weights = weights
        self._period = period = sum(weights)
        self._of_turn: list[tuple[int, int]] = []
        taking = [one for one, weight in enumerate(weights) if weight]
        slack = max(2 * len(taking) - 2, 1)
        common = math.lcm(*(weights[one] for one in taking))
        counts = [0] * len(weights)
        for turn in range(1, period + 1):
            behind = {one: turn * weights[one] - counts[one] * period for one in taking}
            eligible = [one for one in taking if slack * behind[one] >= period]
            chosen = min(
                eligible, key=lambda one: ((slack - 1) * period - slack * behind[one]) * (common // weights[one])
            )
            self._of_turn.append((chosen, counts[chosen]))
            counts[chosen] += 1

    def at(self, position: int) -> tuple[int, int]:
        """Return who has the turn at ``position`` (from 0), and how many it has had before."""
        rounds, turn = divmod(position, self._period)
        chosen, count = self._of_turn[turn]
        return chosen, rounds * self._weights[chosen] + count

    def counts(self, num_turns: int) -> list[int]:
        """Return how many of the first turns each has."""
        rounds, rest = divmod(num_turns, self._period)
        counts = [rounds * weight for weight in self._weights]
        for chosen, _ in self._of_turn[:rest]:
            counts[chosen] += 1
        return counts


@lru_cache(maxsize=8)
def _places(num_rows: int, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    """Return where each row is in a permutation."""
    return np.argsort(_permutation(num_rows, seeds))


_turns = lru_cache(maxsize=8)(Turns)


def turns_of(mix: Mix) -> Turns:
    """Return whose turn it is under a mix."""
    return _turns(tuple(mix.weights))


def whole_weights(shares: Sequence[TaskShare]) -> list[int]:
    """Return whole numbers in proportion to ratio times rows, as small as they can be, and ``MAX_PERIOD`` in all."""
    exact = [Fraction(str(share.ratio)) * share.num_rows for share in shares]
    common = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * common) for one in exact]
    whole = [one // math.gcd(*whole) for one in whole]
    total = sum(whole)
    return whole if total <= MAX_PERIOD else [max(min(one, 1), one * MAX_PERIOD // total) for one in whole]


@lru_cache(maxsize=64)
def _permutation(num_rows: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    return np.random.default_rng(list(seed)).permutation(num_rows)
