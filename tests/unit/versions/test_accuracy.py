"""The interval of an accuracy holds the truth as often as it says; pass@k is what all draws of k answers come to."""

import itertools
import math
import random

import pytest

from areal_async.versions.accuracy import MAX_REASONS, interval_95, measure, most_frequent, pass_at


def test_of_right_and_wrong_answers_it_is_wilsons() -> None:
    """At both ends the score test of 20 right answers of 50 is just at its bound."""
    for share in interval_95([1.0] * 20 + [0.0] * 30) or ():
        assert abs(0.4 - share) / math.sqrt(share * (1 - share) / 50) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize(("reward", "ends"), [(0.0, (0.0, 0.2775)), (1.0, (0.7225, 1.0))])
def test_where_all_answers_are_alike_it_has_a_width_and_stays_within_0_and_1(
    reward: float, ends: tuple[float, float]
) -> None:
    found = interval_95([reward] * 10)

    assert found == pytest.approx(ends, abs=5e-5)


def test_of_other_rewards_it_is_that_of_their_mean() -> None:
    assert interval_95([0.0, 0.5, 1.0, 0.5]) == pytest.approx((0.5 - 0.40008, 0.5 + 0.40008), abs=1e-4)


def test_nothing_is_told_from_nothing() -> None:
    assert interval_95([]) is None
    assert interval_95([0.3]) is None
    assert interval_95([1.0]) == pytest.approx((0.2065, 1.0), abs=5e-5)


def test_95_of_100_intervals_hold_the_share_of_right_answers() -> None:
    """Exactly, by the binomial distribution, on the average over shares: of 40 answers."""
    count, shares = 40, [number / 100 for number in range(5, 96)]
    intervals = [interval_95([1.0] * right + [0.0] * (count - right)) or (0.0, 0.0) for right in range(count + 1)]
    held = [
        sum(
            math.comb(count, right) * share**right * (1 - share) ** (count - right)
            for right, (low, high) in enumerate(intervals)
            if low <= share <= high
        )
        for share in shares
    ]

    assert sum(held) / len(held) == pytest.approx(0.95, abs=0.005)


def test_about_95_of_100_intervals_hold_the_mean_of_other_rewards() -> None:
    draw = random.Random(7)
    num_held = 0
    for _ in range(1000):
        low, high = interval_95([draw.gauss(0.3, 1) for _ in range(60)]) or (0.0, 0.0)
        num_held += low <= 0.3 <= high

    assert 925 <= num_held <= 970


def test_pass_at_k_is_the_share_of_all_draws_of_k_answers_with_a_right_one() -> None:
    rows = [[1.0, 0.0, 0.0, 0.5, 0.0], [2.0, 1.0, 0.0, 0.99, -1.0], [0.0] * 5, [1.0] * 5]
    for size in range(1, 6):
        draws = [[any(one >= 1 for one in drawn) for drawn in itertools.combinations(row, size)] for row in rows]
        wanted = sum(sum(row) / len(row) for row in draws) / len(rows)

        assert pass_at(size, rows) == pytest.approx(wanted)
    assert pass_at(2, [[1.0], [0.0, 0.0]]) == 0.0
    assert pass_at(3, [[1.0], [0.0, 0.0]]) is None


def test_each_row_counts_once_however_many_of_its_answers_were_scored() -> None:
    measured = measure([[1.0, 0.0, 0.0, 1.0], [0.0], []], num_samples=4)

    assert measured.accuracy == 0.25
    assert measured.pass_at == {"1": 0.25, "2": pytest.approx(5 / 6), "4": 1.0}
    assert (measured.low, measured.high) == (0.0, (interval_95([0.5, 0.0]) or ())[1])
    assert measure([[-1.0, 2.0], [0.0]], num_samples=2)[1:3] == interval_95([0.5, 0.0])
    assert measure([[1.0], [0.0]], num_samples=1) == (0.5, *(interval_95([1.0, 0.0]) or ()), {}, False)
    assert measure([[], []], num_samples=3) == (None, None, None, {}, False)
    assert measure([[1.0, 0.5], [0.0]], num_samples=2).is_graded
    assert list(measure([[1.0] * 6], num_samples=6).pass_at) == ["1", "2", "4", "6"]


def test_the_most_frequent_reasons_are_kept_and_short() -> None:
    told = most_frequent(["a", "b" * 1000, "b" * 1000, *map(str, range(10))])

    assert [*told.items()][0] == ("b" * 300, 2)
    assert len(told) == MAX_REASONS
