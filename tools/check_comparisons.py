"""Do comparisons of versions say no more than there is, and do they find what there is? Simulated, in seconds.

    python -m tools.check_comparisons
    python -m tools.check_comparisons --comparisons 10000 --rows 1000

Rows differ in how hard they are. Of identical versions, the test that may be looked at after every row
(``areal_async/versions/sequential.py``) has to tell at most alpha apart, and 2 standard errors; exits with 1 when it
tells more. Then how often a planted difference is found, and after how many rows; beside it the test of one look at the
end (``areal_async/versions/statistics.py``).
"""

import argparse
import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_async.versions.sequential import log_bets, log_capital
from areal_async.versions.statistics import bootstrap_interval

NUM_COMPARISONS = 2000
NUM_ROWS = 400
ALPHA = 0.05
PLANTED = (0.0, 0.02, 0.05, 0.1, 0.2)
EASE = (2.0, 2.0)
"""Of the beta distribution that rows' chances to be answered right are drawn from."""
NUM_LOOKED_AT_ONCE = 300
"""Comparisons whose one look is simulated too: a bootstrap takes milliseconds."""
NUM_RESAMPLES = 2000
CHUNK = 200
"""Comparisons at once, for memory."""

Floats = NDArray[np.float64]


def draw(num_comparisons: int, num_rows: int, difference: float, *, seed: int = 0) -> Floats:
    """Return what the second side gets more than the first, answers right or wrong, as ``[C, R]``.

    The second is right more often by ``difference`` in the mean, and less where a chance would leave [0, 1].
    """
    random = np.random.default_rng(seed)
    chances_CR = random.beta(*EASE, size=(num_comparisons, num_rows))
    first, second = random.random((2, num_comparisons, num_rows))
    differences_CR: Floats = (second < chances_CR + difference).astype(float) - (first < chances_CR)
    return differences_CR


def rows_needed(differences_CR: Floats, *, alpha: float = ALPHA) -> Floats:
    """Return after how many rows each comparison is told apart, as ``[C]``; infinite where it never is."""
    found = []
    for start in range(0, len(differences_CR), CHUNK):
        products = log_bets(differences_CR[start : start + CHUNK], np.zeros(())).cumsum(axis=-1)
        is_apart_CR = log_capital(products) >= math.log(1 / alpha)
        found.append(np.where(is_apart_CR.any(axis=1), is_apart_CR.argmax(axis=1) + 1.0, math.inf))
    return np.concatenate(found)


def most_told_apart(num_comparisons: int, *, alpha: float = ALPHA) -> int:
    """Return how many of identical versions may be told apart: a share of alpha, and 2 standard errors."""
    return math.floor(num_comparisons * alpha + 2 * math.sqrt(num_comparisons * alpha * (1 - alpha)))


def told_by_one_look(differences_CR: Floats) -> float:
    """Return the share of comparisons whose bootstrap interval leaves 0 out."""
    ends = [bootstrap_interval(one, seed=0, num_resamples=NUM_RESAMPLES) for one in differences_CR]
    return float(np.mean([low > 0 or high < 0 for low, high in filter(None, ends)]))


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=NUM_COMPARISONS)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    arguments = parser.parse_args(words)
    print(f"{arguments.comparisons} comparisons over {arguments.rows} rows, alpha {ALPHA}\n")
    print("| planted | told apart, looking after each row | rows until then (median) | one look at the end |")
    print("|--:|--:|--:|--:|")
    num_false = 0
    for planted in PLANTED:
        differences = draw(arguments.comparisons, arguments.rows, planted)
        needed = rows_needed(differences)
        if not planted:
            num_false = int(np.isfinite(needed).sum())
        found = f"{np.isfinite(needed).mean():.3f} | {np.median(needed):.0f}"
        print(f"| {planted} | {found} | {told_by_one_look(differences[:NUM_LOOKED_AT_ONCE]):.3f} |")
    most = most_told_apart(arguments.comparisons)
    print(f"\nidentical versions told apart: {num_false}, at most {most} are allowed")
    return 0 if num_false <= most else 1


if __name__ == "__main__":
    sys.exit(main())
