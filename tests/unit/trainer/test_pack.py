"""Packing loses nothing and repeats nothing, and every row and rank stays within its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import UserError
from areal_async.trainer.pack import balance, pack

lengths = st.lists(st.integers(1, 64), max_size=60)


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
