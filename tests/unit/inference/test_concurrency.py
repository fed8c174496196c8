"""A server's limit grows by steps while it holds requests back, and shrinks by a share when the server has too many."""

from hypothesis import given
from hypothesis import strategies as st

from areal_async.inference.concurrency import SMALLEST_LIMIT, ConcurrencyLimit, Load

ROOMY = Load(num_running=64, num_waiting=0, token_usage=0.5)
QUEUEING = Load(num_running=64, num_waiting=32, token_usage=0.5)
NEARLY_FULL = Load(num_running=64, num_waiting=0, token_usage=0.96)


def test_limit_grows_by_one_step_while_it_is_reached_and_the_server_has_room() -> None:
    limit = ConcurrencyLimit(64)

    assert [limit.observe(ROOMY, num_requests=limit.value) for _ in range(3)] == [68, 72, 76]


def test_limit_that_holds_nothing_back_stays() -> None:
    assert ConcurrencyLimit(64).observe(ROOMY, num_requests=63) == 64


def test_limit_shrinks_by_a_fifth_at_the_second_sign_of_too_much_in_a_row() -> None:
    for load in (QUEUEING, NEARLY_FULL):
        limit = ConcurrencyLimit(100)

        assert [limit.observe(load, num_requests=100) for _ in range(4)] == [100, 80, 80, 64]


def test_one_sign_alone_as_after_a_weight_swap_changes_nothing() -> None:
    limit = ConcurrencyLimit(100)

    for load in (QUEUEING, ROOMY, QUEUEING, ROOMY):
        assert limit.observe(load, num_requests=50) == 100


def test_limit_far_above_what_the_server_has_shrinks_from_what_it_has() -> None:
    limit = ConcurrencyLimit(1000)
    limit.observe(QUEUEING, num_requests=100)

    assert limit.observe(QUEUEING, num_requests=100) == 80


def test_few_waiting_requests_keep_the_limit_where_it_is() -> None:
    limit = ConcurrencyLimit(64)
    load = Load(num_running=64, num_waiting=8, token_usage=0.5)

    assert [limit.observe(load, num_requests=64) for _ in range(5)] == [64] * 5


@given(st.lists(st.integers(min_value=1, max_value=500), min_size=1, max_size=3))
def test_limit_settles_near_what_the_server_can_run(capacities: list[int]) -> None:
    limit = ConcurrencyLimit(64)
    for capacity in capacities:
        for _ in range(400):
            num_requests = limit.value  # as many as may be
            num_running = min(capacity, num_requests)
            load = Load(num_running=num_running, num_waiting=num_requests - num_running, token_usage=0.5)
            limit.observe(load, num_requests=num_requests)

        assert max(SMALLEST_LIMIT, 0.7 * capacity) <= limit.value <= max(SMALLEST_LIMIT, 1.125 * capacity + 4)
