"""How sure a mean reward over held-out rows is."""

import math
import statistics
from collections.abc import Sequence

Z_95 = 1.959964
"""Of the standard normal distribution 95 % lie within this."""


def interval_95(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, over rows drawn at random.

    Rewards of nothing but 0 and 1 have Wilson's score interval, which stays within 0 and 1 and has a width even where
    all are alike; others that of the normal approximation.

    Returns:
        Both ends; ``None`` where there is nothing to tell it from: no reward, or one that is not 0 or 1.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    count = len(rewards)
    if not count:
        return None
    mean = math.fsum(rewards) / count
    if set(rewards) <= {0.0, 1.0}:
        shrunk = 1 + Z_95**2 / count
        middle = (mean + Z_95**2 / (2 * count)) / shrunk
        half = Z_95 / shrunk * math.sqrt(mean * (1 - mean) / count + Z_95**2 / (4 * count**2))
        return max(middle - half, 0.0), min(middle + half, 1.0)
    if count == 1:
        return None
    half = Z_95 * statistics.stdev(rewards) / math.sqrt(count)
    return mean - half, mean + half
