"""Two sides that answered the same rows, compared in pairs: how much more the second one gets, and how sure that is.

A row's value is the mean reward of its scored answers. A row is left out, and counted, where one of the sides has no
scored answer to it: an error is never a reward of 0.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rewards = Mapping[Hashable, Sequence[float]]
"""Row -> rewards of its scored answers."""

NUM_RESAMPLES = 10_000
ALPHA = 0.05
"""Chance that an interval does not hold what it is of: one of 95 %."""
MIN_ROWS = 2
"""Rows from which on there is an interval: one row says nothing of how rows differ."""
NUM_DIGITS = 12
"""Of an interval's ends, behind the point."""
CHUNK_ELEMENTS = 1 << 22
"""Of resamples at once: 64 MiB for their places and values."""


class Paired(NamedTuple):
    """What the second side gets more than the first, over the rows that both have answered."""

    num_rows: int
    num_left_out: int
    """Rows to which one side or both have no scored answer."""
    first: float | None
    """Mean over the rows of their values; None, as what follows, where no row is left."""
    second: float | None
    difference: float | None
    """Of the means: the second's less the first's."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the difference over rows; None for fewer than two rows."""
    wins: int
    """Rows that have more value from the second side."""
    ties: int
    losses: int
    mcnemar_p: float | None
    """How likely wins and losses as unequal as these are of sides equally often right; None where a reward is neither
    0 nor 1. Of several answers to a row the majority speaks: right where more than half of them are."""


def compare(first: Rewards, second: Rewards, *, seed: int = 0, alpha: float = ALPHA) -> Paired:
    """Compare two sides; the same rewards and seed give the same numbers, in whichever order rows came.

    Args:
        alpha: chance that the interval does not hold the difference.
    """
    both = [row for row in first if first[row] and second.get(row)]
    ours = np.array([_mean(first[row]) for row in both])
    theirs = np.array([_mean(second[row]) for row in both])
    differences = np.sort(theirs - ours)
    low, high = bootstrap_interval(differences, seed=seed, alpha=alpha) or (None, None)
    is_binary = all(reward in (0, 1) for side in (first, second) for row in both for reward in side[row])
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    return Paired(
        num_rows=len(both),
        num_left_out=len(first.keys() | second.keys()) - len(both),
        first=_mean(ours) if both else None,
        second=_mean(theirs) if both else None,
        difference=_mean(differences) if both else None,
        low=low,
        high=high,
        wins=wins,
        ties=len(both) - wins - losses,
        losses=losses,
        mcnemar_p=mcnemar(ours > 0.5, theirs > 0.5) if both and is_binary else None,
    )


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean, rounded once: rows of the same rewards in another order are a tie."""
    return math.fsum(values) / len(values)


def bootstrap_interval(
    differences: NDArray[np.float64], *, seed: int, num_resamples: int = NUM_RESAMPLES, alpha: float = ALPHA
) -> tuple[float, float] | None:
    """Return the percentile interval of the mean of differences [R], over rows drawn at random.

    Percentiles, and not BCa, whose low end is above the mean of rows in 5 % of all comparisons in place of 2.5 % where
    few rows differ, all of them by 1: the gate reads this end.

    Returns:
        Both ends; ``None`` for fewer than two rows.

    Source: Efron and Tibshirani 1993, "An introduction to the bootstrap", section 13.3.
    """
    num_rows = len(differences)
    if num_rows < MIN_ROWS:
        return None
    random = np.random.default_rng(seed)
    size = max(1, CHUNK_ELEMENTS // num_rows)
    means = np.concatenate(
        [
            differences[random.integers(num_rows, size=(min(size, num_resamples - done), num_rows))].mean(axis=1)
            for done in range(0, num_resamples, size)
        ]
    )
    low, high = np.quantile(means, (alpha / 2, 1 - alpha / 2))
    # A sum that would be 0 may be a trace below, and 0 is what the low end is most often asked to reach.
    return round(float(low), NUM_DIGITS), round(float(high), NUM_DIGITS)


def mcnemar(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """Return the two-sided p-value that two sides, right or wrong on each row [R], are right equally often.

    Exact: of the n rows on which one side alone is right, the second is right on as many as of n tosses of a coin.

        p = min(1, 2 P(X <= min(wins, losses))),  X ~ Binomial(n, 1/2)

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 12; its exact form as in Fagerland et al. 2013, BMC Medical Research Methodology 13:91, equation 2.
    """
    wins, losses = int((second & ~first).sum()), int((first & ~second).sum())
    total, least = wins + losses, min(wins, losses)
    steps = np.arange(1, least + 1)
    log_counts = np.concatenate(([0.0], np.cumsum(np.log(total - steps + 1) - np.log(steps))))  # of n over 0, 1, ...
    return float(min(1.0, 2 * np.exp(log_counts - total * math.log(2)).sum()))
