"""A paired comparison's numbers are scipy's; errors leave rows out, and several answers to a row speak as one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.versions.statistics import CHUNK_ELEMENTS, bootstrap_interval, compare, mcnemar

SAMPLES = {
    "right or wrong": [-1.0] * 6 + [0.0] * 95 + [1.0] * 18,
    "the mean of 8 answers": [((7 * place) % 9 - 3) / 8 for place in range(60)],
    "graded": [math.sin(place) + 0.1 for place in range(200)],
    "skewed": [-math.log((place + 0.5) / 25) - 0.8 for place in range(25)],
}
SCIPYS = {
    "right or wrong": (0.0252101, 0.1764706, 0.0400925),
    "the mean of 8 answers": (0.0416667, 0.2083333, 0.0423205),
    "graded": (0.0064165, 0.2023572, 0.0498717),
    "skewed": (-0.1538232, 0.5791157, 0.1874972),
}
"""Low, high and standard error, of scipy 1.17.1::

    scipy.stats.bootstrap((sample,), np.mean, method="percentile", n_resamples=400_000, rng=np.random.default_rng(1))
"""
STEPS = {"right or wrong": 1 / 119, "the mean of 8 answers": 1 / 480}
"""Between means that there can be: an end is one of them, or the next."""


@pytest.mark.parametrize("name", SAMPLES)
def test_the_interval_is_scipys_within_simulation_error(name: str) -> None:
    *ends, error = SCIPYS[name]
    sample = np.array(SAMPLES[name])

    found = bootstrap_interval(sample, seed=3)

    # Of 10,000 resamples this quantile has a standard error of sqrt(.025 * .975 / 10,000) / .058 = .027 of the mean's.
    assert found == pytest.approx(ends, abs=4 * 0.027 * error + STEPS.get(name, 0) + 1e-6)
    assert found == bootstrap_interval(sample, seed=3)
    assert bootstrap_interval(sample, seed=4) != found or name in STEPS


def test_resamples_that_fill_several_chunks_are_as_many() -> None:
    """Rows by the ten thousand would take gigabytes at once."""
    sample = np.arange(CHUNK_ELEMENTS // 1000) % 7 - 3.0
    error = sample.std() / math.sqrt(len(sample))

    low, high = bootstrap_interval(sample, seed=0, num_resamples=3001) or (0, 0)
    only, same = bootstrap_interval(sample, seed=0, num_resamples=1) or (0, 1)

    assert only == same
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_an_end_at_0_is_not_a_trace_below_it() -> None:
    """A row lost wholly and three won by a third sum up to -2e-17, unrounded."""
    found = bootstrap_interval(np.array([-1.0] + [1 / 3] * 12 + [0.0] * 3), seed=0)

    assert found == (0.0, 0.3125)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_too_few_rows_have_no_interval(num_rows: int) -> None:
    assert bootstrap_interval(np.ones(num_rows), seed=0) is None


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 5, 1.0),
        (3, 9, 0.14599609375),
        (40, 60, 0.05688793364098089),
        (700, 612, 0.016278345620440816),
    ],
)
def test_mcnemars_p_is_that_of_scipys_binomial_test(wins: int, losses: int, p: float) -> None:
    """``scipy.stats.binomtest(wins, wins + losses, 0.5).pvalue``, and 1 where no row differs."""
    second = np.array([True] * wins + [False] * losses + [True, False] * 50)
    first = np.array([False] * wins + [True] * losses + [True, False] * 50)

    assert mcnemar(first, second) == pytest.approx(p, rel=1e-9)
    assert mcnemar(second, first) == pytest.approx(p, rel=1e-9)


def test_a_row_counts_once_by_the_mean_of_its_answers() -> None:
    first = {0: [1.0, 0.0], 1: [0.0, 0.0, 0.0], 2: [1.0]}
    second = {0: [0.0, 1.0, 1.0, 0.0], 1: [0.0, 0.0, 1.0], 2: [0.0, 1.0]}

    found = compare(first, second)

    assert (found.wins, found.ties, found.losses) == (1, 1, 1)
    assert found.first == pytest.approx((0.5 + 0 + 1) / 3)
    assert found.second == pytest.approx((0.5 + 1 / 3 + 0.5) / 3)
    assert found.difference == pytest.approx(found.second - found.first)


def test_the_same_rewards_in_another_order_are_a_tie() -> None:
    rewards = [0.1, 0.2, 0.3]

    found = compare({0: rewards, 1: [0.0]}, {1: [0.0], 0: rewards[::-1]})

    assert (found.wins, found.ties, found.losses, found.difference) == (0, 2, 0, 0.0)


def test_rows_in_another_order_have_the_same_interval() -> None:
    first, second = ({row: [value] for row, value in enumerate(values)} for values in ([0.0] * 25, SAMPLES["skewed"]))

    assert compare(dict(reversed(first.items())), second) == compare(first, second)


def test_a_row_without_a_scored_answer_on_one_side_is_left_out_and_counted() -> None:
    first = {0: [1.0], 1: [1.0], 2: [], 3: [1.0]}
    second = {0: [1.0], 1: [], 4: [1.0], 3: [0.0]}

    found = compare(first, second)

    assert (found.num_rows, found.num_left_out) == (2, 3)
    assert (found.first, found.second, found.losses) == (1.0, 0.5, 1)


def test_where_no_row_is_left_nothing_is_known() -> None:
    found = compare({0: [1.0]}, {0: []})

    assert (found.num_rows, found.num_left_out) == (0, 1)
    assert {found.first, found.second, found.difference, found.low, found.high, found.mcnemar_p} == {None}


def test_of_several_answers_the_majority_is_right_or_wrong() -> None:
    """Half of them is no majority: of these rows the second alone has one in the first two, the first in none."""
    first = {0: [1.0, 0.0], 1: [0.0, 0.0, 1.0], 2: [1.0, 1.0, 0.0]}
    second = {0: [1.0, 1.0], 1: [0.0, 1.0, 1.0], 2: [1.0, 0.0, 1.0]}

    assert compare(first, second).mcnemar_p == pytest.approx(0.5)


def test_rewards_that_are_neither_0_nor_1_have_no_mcnemar() -> None:
    assert compare({0: [0.5]}, {0: [1.0]}).mcnemar_p is None


rewards = st.dictionaries(st.integers(0, 30), st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), max_size=3))


@given(rewards, rewards)
def test_neither_side_nor_the_order_of_rows_is_favoured(
    first: dict[int, list[float]], second: dict[int, list[float]]
) -> None:
    found, turned = compare(first, second), compare(second, first)
    reordered = compare(dict(reversed(first.items())), dict(reversed(second.items())))

    assert reordered == found
    assert (turned.wins, turned.losses, turned.num_rows) == (found.losses, found.wins, found.num_rows)
    assert turned.mcnemar_p == found.mcnemar_p
    if found.difference is not None and turned.difference is not None:
        assert turned.difference == pytest.approx(-found.difference)
    if found.low is not None and found.high is not None and found.difference is not None:
        assert found.low <= found.difference + 1e-9
        assert found.high >= found.difference - 1e-9
