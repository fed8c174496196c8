"""Corrections weigh, leave out and reject what their papers say, and nothing else."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.corrections import (
    icepop,
    reject_sequences,
    reject_tokens,
    second_moment_cutoff,
    truncate,
    truncate_sequences,
)
from areal_async.algorithms.ratios import loglinear_proximal

# Ratios 2, 0.25 and 8 of one sequence, of geometric mean 1.587; 1.1 of another.
GAPS = torch.tensor([2.0, 0.25, 8.0, 1.1], dtype=torch.float64).log()
MASK = torch.ones(4, dtype=torch.bool)
SEQUENCE = torch.tensor([0, 0, 0, 1])


def test_truncation_cuts_the_large_and_leaves_the_rest() -> None:
    assert truncate(GAPS, MASK, None, cap=5.0).tolist() == pytest.approx([2, 0.25, 5, 1.1])


def test_icepop_leaves_out_tokens_on_either_side_and_keeps_the_weight_of_others() -> None:
    assert icepop(GAPS, MASK, None, low=0.5, high=5.0).tolist() == pytest.approx([2, 0, 0, 1.1])


def test_icepop_leaves_out_a_token_whose_weight_is_infinite() -> None:
    assert icepop(torch.tensor([1e4]), MASK[:1], None, low=0.5, high=5.0).tolist() == [0]


def test_rejection_by_token_weighs_what_it_keeps_by_one() -> None:
    assert reject_tokens(GAPS, MASK, None, low=0.5, high=5.0).tolist() == [1, 0, 0, 1]


def test_rejection_by_sequence_looks_at_the_geometric_mean_and_takes_all_or_nothing() -> None:
    assert reject_sequences(GAPS, MASK, SEQUENCE, low=0.5, high=1.5).tolist() == [0, 0, 0, 1]
    assert reject_sequences(GAPS, MASK, SEQUENCE, low=0.5, high=1.6).tolist() == [1, 1, 1, 1]


def test_a_sequences_weight_is_the_product_of_its_tokens() -> None:
    assert truncate_sequences(GAPS, MASK, SEQUENCE, cap=3.0).tolist() == pytest.approx([3, 3, 3, 1.1])
    assert truncate_sequences(GAPS, MASK, SEQUENCE, cap=9.0).tolist() == pytest.approx([4, 4, 4, 1.1])


@given(st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.05, 0.2, 1.0]), max_size=7), st.sampled_from([0.041, 0.51, 1e-9]))
@settings(deadline=None)
def test_m2po_keeps_the_most_tokens_whose_mean_moment_is_within_the_threshold(
    squares: list[float], threshold: float
) -> None:
    squares_N = torch.tensor(squares, dtype=torch.float64)

    kept = squares_N < second_moment_cutoff(squares_N, threshold=threshold)

    # Of all sets that hold every token below some value and none above it, the largest that fits.
    allowed = [
        limit
        for limit in [-1.0, *squares]
        if sum(one for one in squares if one <= limit) <= threshold * sum(one <= limit for one in squares)
    ]
    limit = max(allowed) if allowed else -1.0
    assert kept.tolist() == [one <= limit for one in squares]


def test_m2po_does_not_look_at_the_order_of_tokens() -> None:
    values = [0.0, 0.05, 0.05, 0.3]
    for order in itertools.permutations(values):
        squares = torch.tensor(order, dtype=torch.float64)
        kept = squares < second_moment_cutoff(squares, threshold=0.041)
        assert sorted(squares[kept].tolist()) == pytest.approx([0.0, 0.05, 0.05])


def test_m2po_keeps_all_when_the_batch_is_close_and_nothing_when_every_token_is_far() -> None:
    assert second_moment_cutoff(torch.tensor([0.01, 0.02]), threshold=0.04).item() == math.inf
    assert second_moment_cutoff(torch.tensor([0.3, 0.2]), threshold=0.04).item() == pytest.approx(0.2)


def test_the_loglinear_proximal_policy_starts_at_the_behaviour_and_nears_the_trained_policy_with_age() -> None:
    behave, trained = torch.full((4,), -2.0), torch.full((4,), -1.0).requires_grad_()

    proximal = loglinear_proximal(trained, behave, torch.tensor([0, 1, 3, 9]))

    assert proximal.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.1])
    assert not proximal.requires_grad
