"""Packing loses nothing and repeats nothing, and every row and rank stays within its bound."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import UserError
from areal_async.trainer.packing.pack import Parts, _cheapest_first, _differenced, balance, pack, spread

lengths = st.lists(st.integers(1, 64), max_size=60)


def loads(parts: Sequence[Sequence[int]], costs: Sequence[int]) -> list[int]:
    return [sum(costs[index] for index in part) for part in parts]


def greedy(costs: Sequence[int], ranks: int) -> Parts:
    return _cheapest_first(costs, ranks, lengths=[0] * len(costs), room=0)


def fewest_rows(lengths: Sequence[int], budget: int) -> int:
    """Return the smallest number of rows, by trying every place for every sequence."""
    best = len(lengths)

    def put(index: int, rows: list[int]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if index == len(lengths):
            best = len(rows)
            return
        for place, filled in enumerate(rows):
            if filled + lengths[index] <= budget:
                put(index + 1, [*rows[:place], filled + lengths[index], *rows[place + 1 :]])
        put(index + 1, [*rows, lengths[index]])

    put(0, [])
    return best


@given(lengths)
def test_every_sequence_is_in_exactly_one_row_and_no_row_is_over_budget(lengths: list[int]) -> None:
    rows = pack(lengths, token_budget=64)

    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= 64 for row in rows)


@given(lengths)
def test_rows_are_few(lengths: list[int]) -> None:
    # At most one row can be half empty, or two of them would have been one.
    rows = pack(lengths, token_budget=64)

    assert sum(sum(lengths[index] for index in row) <= 32 for row in rows) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_rows_are_at_most_eleven_ninths_of_the_fewest_possible(lengths: list[int]) -> None:
    assert 9 * len(pack(lengths, token_budget=30)) <= 11 * fewest_rows(lengths, 30) + 6


def test_a_sequence_longer_than_a_row_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="got a sequence of 65 tokens, need at most trainer.token_budget=64"):
        pack([3, 65, 64], token_budget=64)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_cost_is_on_exactly_one_rank_and_loads_differ_by_one_cost_at_most(costs: list[int], ranks: int) -> None:
    shares = balance(costs, num_ranks=ranks)

    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_the_dearest_rank_is_never_dearer_than_the_greedy_methods(costs: list[int], ranks: int) -> None:
    dearest = max(loads(balance(costs, num_ranks=ranks), costs))

    assert dearest <= max(loads(greedy(costs, ranks), costs))
    assert dearest <= max(loads(_differenced(costs, ranks), costs))


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 4))
def test_the_dearest_rank_is_within_a_third_of_the_best_division(costs: list[int], ranks: int) -> None:
    divisions = itertools.product(range(ranks), repeat=len(costs))
    best = min(max(np.bincount(places, weights=costs, minlength=ranks)) if places else 0 for places in divisions)

    assert 3 * max(loads(balance(costs, num_ranks=ranks), costs)) <= 4 * best


def test_differencing_finds_the_even_division_that_the_greedy_method_misses() -> None:
    costs = [8, 7, 6, 5, 4]  # Karmarkar and Karp's own kind of example: the greedy method ends at 17 and 13

    assert max(loads(greedy(costs, 2), costs)) == 17
    assert max(loads(balance(costs, num_ranks=2), costs)) == 16


@given(lengths, st.integers(0, 5))
def test_spreading_keeps_every_sequence_and_the_budget(lengths: list[int], more: int) -> None:
    costs = [length + length * length for length in lengths]
    num_rows = len(pack(lengths, token_budget=64)) + more

    rows = spread(lengths, costs, token_budget=64, num_rows=num_rows)

    assert len(rows) == num_rows
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(filled <= 64 for filled in loads(rows, lengths))
    assert loads(rows, costs) == sorted(loads(rows, costs), reverse=True)


@given(lengths, st.integers(0, 5))
def test_spreading_never_makes_the_dearest_row_dearer_than_packing_does(lengths: list[int], more: int) -> None:
    costs = [length + length * length for length in lengths]
    packed = pack(lengths, token_budget=64)

    rows = spread(lengths, costs, token_budget=64, num_rows=len(packed) + more)

    assert max(loads(rows, costs), default=0) <= max(loads(packed, costs), default=0)


def test_rows_of_even_cost_are_found() -> None:
    lengths = [20, 20, 20, 4]

    assert loads(pack(lengths, token_budget=64), lengths) == [64]
    assert loads(spread(lengths, lengths, token_budget=64, num_rows=2), lengths) == [40, 24]
    assert loads(spread(lengths, lengths, token_budget=64, num_rows=3), lengths) == [24, 20, 20]


def test_more_rows_than_sequences_leaves_the_last_empty() -> None:
    assert spread([3, 9], [3, 9], token_budget=64, num_rows=4) == [[1], [0], [], []]


def test_fewer_rows_than_packing_needs_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="got 2 rows, need at most 1"):
        spread([40, 40], [1, 1], token_budget=64, num_rows=1)


@given(lengths, st.integers(1, 9))
def test_the_same_input_is_divided_alike_every_time(lengths: list[int], parts: int) -> None:
    rows = len(pack(lengths, token_budget=64)) + parts

    first, again = (
        (balance(one, num_ranks=parts), spread(one, one, token_budget=64, num_rows=rows))
        for one in (lengths, list(lengths))
    )

    assert first == again
