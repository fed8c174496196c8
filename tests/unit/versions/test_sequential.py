"""The interval that may be looked at after every row tells identical versions apart no more often than it says."""

import itertools
from collections import Counter

import numpy as np
import pytest

from areal_async.versions.sequential import NUM_STEPS, ConfidenceSequence, log_bets, log_capital
from tools import check_comparisons
from tools.check_comparisons import ALPHA, draw, most_told_apart, rows_needed

NUM_COMPARISONS = 2000
NUM_ROWS = 400


def test_of_identical_versions_looked_at_after_every_row_no_more_than_alpha_are_told_apart() -> None:
    needed = rows_needed(draw(NUM_COMPARISONS, NUM_ROWS, 0.0))

    assert np.isfinite(needed).sum() <= most_told_apart(NUM_COMPARISONS) == 119


def test_a_planted_difference_is_found_in_most_comparisons() -> None:
    """Of 0.1, in 0.57 of them; one look at the end would find it in 0.87."""
    needed = rows_needed(draw(NUM_COMPARISONS, NUM_ROWS, 0.1))

    assert np.isfinite(needed).sum() >= 0.5 * NUM_COMPARISONS


def test_the_table_is_printed_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_comparisons.main(["--comparisons", "50", "--rows", "60"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n| 0.") == len(check_comparisons.PLANTED)
    assert "identical versions told apart: " in said


def test_the_capital_against_the_true_mean_is_expected_to_stay_1() -> None:
    """Over all sequences of three differences, of which each is 1, 0.5 or -1 with these chances: a mean of 0.1."""
    chances = {1.0: 0.4, 0.5: 0.2, -1.0: 0.4}
    sequences = np.array(list(itertools.product(chances, repeat=3)))
    weights = np.array([[chances[one] for one in row] for row in sequences.tolist()]).prod(axis=1)

    capital = np.exp(log_capital(log_bets(sequences, np.array(0.1)).sum(axis=-1)))

    assert weights @ capital == pytest.approx(1)
    assert capital.std() > 0.1


@pytest.mark.parametrize("planted", [0.0, 0.2])
def test_one_that_takes_a_difference_at_a_time_is_the_simulated_one(planted: float) -> None:
    differences = draw(10, 150, planted, seed=1)

    for row, needed in zip(differences, rows_needed(differences), strict=True):
        sequence = ConfidenceSequence(alpha=ALPHA)
        found = np.inf
        for difference in row:
            sequence.add(difference)
            if sequence.tells_apart:
                found = min(found, sequence.count)
        assert found == needed


def test_the_mean_lies_within_it_at_all_times_in_all_but_a_few_sequences() -> None:
    """Of skewed differences with a mean of -0.5, and of others for each of which the mean alone is the same."""
    random = np.random.default_rng(2)
    num_missed = 0
    for number in range(60):
        sequence = ConfidenceSequence(alpha=0.1)
        drawn = 2 * random.beta(0.5, 1.5, size=150) - 1 if number % 2 else random.choice([-1.0, 0.0], size=150)
        held = [(sequence.add(one), sequence.low < -0.5 < sequence.high)[1] for one in drawn]
        num_missed += not all(held)
        assert sequence.high - sequence.low < 1

    assert num_missed <= 6


def test_it_only_narrows_and_is_its_mirror_image_of_mirrored_differences() -> None:
    sequence, mirrored = ConfidenceSequence(), ConfidenceSequence()
    before = (sequence.low, sequence.high)
    assert before == (-1, 1)
    for difference in draw(1, 300, 0.3)[0]:
        sequence.add(difference)
        mirrored.add(-difference)
        assert before[0] <= sequence.low < sequence.high <= before[1]
        before = (sequence.low, sequence.high)

    assert sequence.tells_apart
    assert mirrored.tells_apart
    assert sequence.low >= 0
    assert (mirrored.low, mirrored.high) == pytest.approx((-sequence.high, -sequence.low))


def test_its_ends_are_as_far_as_rewards_reach_and_alpha_lets_them() -> None:
    sequence, small, bold = ConfidenceSequence(reach=10.0), ConfidenceSequence(), ConfidenceSequence(alpha=0.5)
    for difference in draw(1, 100, 0.3)[0]:
        sequence.add(10 * difference)
        small.add(difference)
        bold.add(difference)

    assert (sequence.low, sequence.high) == pytest.approx((10 * small.low, 10 * small.high))
    assert small.low < bold.low < bold.high < small.high


def test_differences_all_alike_narrow_it_to_the_candidates_beside_them() -> None:
    sequence = ConfidenceSequence()
    for _ in range(20_000):
        sequence.add(0.0011)

    assert (sequence.low, sequence.high) == pytest.approx((0, 2 / NUM_STEPS))


def test_it_goes_on_from_how_often_each_difference_came_as_if_it_had_never_stopped() -> None:
    whole = ConfidenceSequence(reach=2.0, alpha=0.1)
    differences = (2 * draw(1, 300, 0.2)[0]).tolist()
    for turn, difference in enumerate(differences):
        if turn in (1, 120):
            counts = Counter(differences[:turn])
            restored = ConfidenceSequence.restored(counts, low=whole.low, high=whole.high, reach=2.0, alpha=0.1)
            assert (restored.low, restored.high, restored.count) == (whole.low, whole.high, turn)
        if turn >= 120:
            restored.add(difference)
        whole.add(difference)

    assert (restored.low, restored.high, restored.count) == (whole.low, whole.high, 300)
    assert -2 < whole.low < whole.high < 2


@pytest.mark.parametrize("difference", [1.01, -2.0, float("nan")])
def test_a_difference_out_of_reach_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="need one within -1.0 and 1.0"):
        ConfidenceSequence().add(difference)
