"""What answers to held-out rows come to: their mean reward and how sure that is, avg@k and pass@k, and what failed."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

Z_95 = 1.959964
"""Half width, in standard deviations, of the middle 95 % of the standard normal distribution."""
PASS_REWARD = 1.0
"""Reward from which on an answer counts as right in pass@k."""
MAX_REASONS = 5
MAX_REASON_CHARACTERS = 300


class Measured(NamedTuple):
    """What the answers to some rows came to."""

    accuracy: float | None
    """Mean over the rows of the mean reward of their answers, which is avg@k; None for no answer."""
    low: float | None
    high: float | None
    """Ends of its 95 % interval over rows, where it has one."""
    pass_at: dict[str, float]
    """k -> pass@k, for 1, 2, 4, ... and the number of answers; empty for one answer a row."""
    is_graded: bool
    """Whether a reward is neither 0 nor 1: then the mean says how good answers are, and not how many are right."""


def sum_up(answers: Collection[tuple[Hashable, float | None, str]], *, num_samples: int) -> dict[str, Any]:
    """Return what answers came to, by the names that ``EvalRecord`` has for it.

    Args:
        answers: row, reward (None where there is none), and why there is none.
    """
    rows: dict[Hashable, list[float]] = defaultdict(list)
    for row, reward, _ in answers:
        if reward is not None:
            rows[row].append(reward)
    num_scored = sum(map(len, rows.values()))
    return {
        **measure(rows.values(), num_samples=num_samples)._asdict(),
        "num_scored": num_scored,
        "num_failed": len(answers) - num_scored,
        "num_samples": num_samples,
        "reasons": most_frequent(reason for _, reward, reason in answers if reward is None),
    }


def measure(rows: Iterable[Sequence[float]], *, num_samples: int) -> Measured:
    """Sum up the rewards of each row's scored answers; rows without one are left out."""
    scored = [rewards for rewards in rows if rewards]
    means = [math.fsum(rewards) / len(rewards) for rewards in scored]
    low, high = interval_95(means) or (None, None)
    if low is not None and high is not None and all(0 <= one <= 1 for rewards in scored for one in rewards):
        low, high = max(low, 0.0), min(high, 1.0)  # where no mean can lie
    sizes = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    found = {size: pass_at(size, scored) for size in [*sizes, num_samples]} if num_samples > 1 else {}
    return Measured(
        accuracy=math.fsum(means) / len(means) if means else None,
        low=low,
        high=high,
        pass_at={str(size): value for size, value in found.items() if value is not None},
        is_graded=any(one not in (0, 1) for rewards in scored for one in rewards),
    )


def pass_at(size: int, rows: Iterable[Sequence[float]]) -> float | None:
    """Return the chance that one of ``size`` answers to a row is right, estimated without bias from all it has.

    Rows with fewer scored answers are left out; None where none has as many.

    Source: Chen et al. 2021, "Evaluating large language models trained on code", arXiv 2107.03374, equation 1.
    """
    counts = ((len(rewards), sum(reward >= PASS_REWARD for reward in rewards)) for rewards in rows)
    chances = [1 - math.comb(count - right, size) / math.comb(count, size) for count, right in counts if count >= size]
    return math.fsum(chances) / len(chances) if chances else None


def most_frequent(reasons: Iterable[str]) -> dict[str, int]:
    """Return the reasons that were given most often, shortened, with how often."""
    return dict(Counter(reason[:MAX_REASON_CHARACTERS] for reason in reasons).most_common(MAX_REASONS))


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
