"""Is one version better than another, asked after every answer: an interval that may be looked at at any time.

An interval of ``statistics`` is right for one look, at a number of rows that was fixed before. Looked at after each row
until it tells two versions apart, it tells any two apart in the end. A confidence sequence holds the true mean at all
times at once, with a probability of at least 1 - alpha: a test may end as soon as it says something.
"""

import math
from collections.abc import Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray

BETS = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Fractions of the largest bet that loses no more than there is. Nine even steps, as in the paper, and three small ones
for differences that are small beside their noise."""
NUM_STEPS = 500
"""Candidates for the mean between 0 and the largest: ends are exact to so small a part of it, rounded outwards."""

Floats = NDArray[np.float64]


def log_bets(differences: Floats, means: Floats) -> Floats:
    """Return what each difference does to each bet against each mean, as logarithms [2, G, ...] of factors.

    Args:
        differences: within [-1, 1]; broadcast against ``means``, within (-1, 1).
    """
    x, m = (differences + 1) / 2, (means + 1) / 2
    gains = np.stack((x / m - 1, (m - x) / (1 - m)))  # of all that may be bet on a larger mean, and on a smaller one
    bets_G = BETS.reshape(-1, *(1,) * (gains.ndim - 1))
    logs: Floats = np.log1p(bets_G * gains[:, None])
    return logs


def log_capital(log_products: Floats) -> Floats:
    """Return the logarithm of the capital, of those [2, G, ...] of what each bet has come to."""
    summed: Floats = np.logaddexp.reduce(log_products, axis=(0, 1))
    return summed - math.log(2 * len(BETS))


class ConfidenceSequence:
    """An interval for the mean of differences within [-reach, reach], narrowed by each as it comes.

    Somebody bets against each candidate m that it is the mean, at odds that are fair if it is. With differences and
    candidates moved into [0, 1], and fractions b_1 ... b_G of the largest bet, the capital after t differences is

        K(m) = 1/2G sum_g prod_i (1 + b_g (x_i / m - 1)) + 1/2G sum_g prod_i (1 + b_g (m - x_i) / (1 - m)).

    Under the true mean it is a martingale of expectation 1, which ever reaches 1 / alpha with a probability of at most
    alpha (Ville). Means against which nobody became that rich are an interval: K is convex. Of the differences it is
    assumed that the expectation of each, given those before, is the mean, and nothing else.

    Source: Waudby-Smith and Ramdas 2023, "Estimating means of bounded random variables by betting", JRSS B 86, theorem
    1 and the hedged grid-Kelly bets (hgKelly) of its appendix; arXiv 2010.09686.
    """

    def __init__(self, *, reach: float = 1.0, alpha: float = 0.05) -> None:
        """Begin without any difference, when nothing is known.

        Args:
            reach: largest size of a difference: 1 for rewards within [0, 1].
            alpha: chance that the interval ever leaves the mean out.
        """
        self.count = 0
        self._reach = reach
        self._most = math.log(1 / alpha)
        self._means_M = np.arange(-NUM_STEPS, NUM_STEPS + 1) / NUM_STEPS
        """What is not refuted, within two candidates which are: or the limits, between which every mean lies."""
        self._log_products_2GM = np.zeros((2, len(BETS), len(self._means_M) - 2))

    @property
    def low(self) -> float:
        """Lower end of the interval, which is open."""
        return float(self._means_M[0]) * self._reach

    @property
    def high(self) -> float:
        """Upper end of the interval, which is open."""
        return float(self._means_M[-1]) * self._reach

    @property
    def tells_apart(self) -> bool:
        """Whether the mean is not 0; it stays so."""
        return self.low >= 0 or self.high <= 0

    def add(self, difference: float) -> None:
        """Take one more difference, and narrow the interval.

        Raises:
            ValueError: it is out of reach.
        """
        if not abs(difference) <= self._reach:
            raise ValueError(f"difference: got {difference}, need one within {-self._reach} and {self._reach}")
        self.count += 1
        self._log_products_2GM += log_bets(np.array(difference / self._reach), self._means_M[1:-1])
        capital_M = log_capital(self._log_products_2GM)
        is_held_M = capital_M < self._most
        is_held_M[capital_M.argmin()] = True  # the mean is beside it, where it lies between two candidates
        first, last = is_held_M.nonzero()[0][[0, -1]]
        self._means_M = self._means_M[first : last + 3]
        self._log_products_2GM = self._log_products_2GM[:, :, first : last + 1]

    @classmethod
    def restored(
        cls, counts: Mapping[float, int], *, low: float, high: float, reach: float = 1.0, alpha: float = 0.05
    ) -> Self:
        """Return one as it was after it took differences, of which only how often each came is kept, and its interval.

        In which order they came decides about nothing else.
        """
        made = cls(reach=reach, alpha=alpha)
        first, last = (round(end / reach * NUM_STEPS) + NUM_STEPS for end in (low, high))
        made._means_M = made._means_M[first : last + 1]
        made._log_products_2GM = made._log_products_2GM[:, :, : len(made._means_M) - 2]
        for difference, count in counts.items():
            made.count += count
            made._log_products_2GM += count * log_bets(np.array(difference / reach), made._means_M[1:-1])
        return made
