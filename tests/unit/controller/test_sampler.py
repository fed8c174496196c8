"""Each prompt has one place per epoch, the order is a function of the seed, and position is all the state."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_async.controller.evaluation_schedule import newest_due_step
from areal_async.controller.sampler import (
    MAX_PERIOD,
    MixedSampler,
    Sampler,
    TaskShare,
    Turns,
    _permutation,
    sampler_of,
    whole_weights,
)
from areal_async.protocol.types import Admitted, GroupId, Mix

MIX = Mix(start=0, weights=[3, 2], counts=[0, 0])
SHARES = st.lists(
    st.builds(TaskShare, st.integers(1, 30), st.sampled_from((0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0))),
    min_size=2,
    max_size=5,
)


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 5))
def test_an_epoch_visits_every_row_once(num_rows: int, epoch: int, seed: int) -> None:
    sampler = Sampler(num_rows, seed=seed)

    groups = [sampler.group_at(epoch * num_rows + offset) for offset in range(num_rows)]

    assert sorted(group.index for group in groups) == list(range(num_rows))
    assert {group.epoch for group in groups} == {epoch}


@given(SHARES, st.integers(0, 60), st.integers(0, 5))
def test_the_first_positions_have_the_groups_that_they_visit_and_no_other(
    shares: list[TaskShare], num_positions: int, seed: int
) -> None:
    for sampler in (Sampler(shares[0].num_rows, seed=seed), MixedSampler(shares, seed=seed)):
        visited = set(sampler.first_groups(num_positions))
        later = {sampler.group_at(num_positions + offset) for offset in range(30)}

        assert all(sampler.is_among_first(group, num_positions) for group in visited)
        assert not any(sampler.is_among_first(group, num_positions) for group in later)


def test_another_sampler_of_the_same_seed_goes_on_where_the_first_stopped() -> None:
    first = [Sampler(10, seed=7).group_at(position) for position in range(25)]

    assert [Sampler(10, seed=7).group_at(position) for position in range(25)] == first


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [Sampler(40, seed=seed).group_at(epoch * 40 + offset).index for offset in range(40)]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_a_pool_is_visited_in_the_order_that_it_always_was() -> None:
    sampler = Sampler(20, seed=3)

    order = [sampler.group_at(position).index for position in range(60)]

    assert order == [int(index) for epoch in range(3) for index in np.random.default_rng([3, epoch]).permutation(20)]


def test_tasks_of_equal_ratios_have_epochs_of_their_own_that_end_together() -> None:
    mixed = sampler_of([TaskShare(12, 2.0), TaskShare(8, 2.0)], seed=3)

    groups = [mixed.group_at(one) for one in range(40)]

    assert [pool.num_rows for pool in mixed.pools] == [12, 8]
    assert [group.epoch for group in groups] == [0] * 20 + [1] * 20


def test_a_run_of_before_keeps_the_one_order_of_its_tasks() -> None:
    shares, one_order = [TaskShare(12, 2.0), TaskShare(8, 2.0)], Sampler(20, seed=3)
    before = sampler_of(shares, seed=3, admitted=Admitted(total=7, num_fresh=7))
    since = sampler_of(shares, seed=3, admitted=Admitted(total=7, num_fresh=7, mixes=[MIX]))

    assert [before.group_at(one) for one in range(50)] == [one_order.group_at(one) for one in range(50)]
    assert [since.group_at(one, [MIX]) for one in range(50)] != [one_order.group_at(one) for one in range(50)]


@given(SHARES)
def test_every_prefix_holds_each_task_within_one_of_its_share(shares: list[TaskShare]) -> None:
    weights = whole_weights(shares)
    turns, total, counts = Turns(weights), sum(weights), Counter[int]()

    for position in range(min(3 * total, 500)):
        task, count = turns.at(position)
        assert count == counts[task]
        counts[task] += 1
        behind = [Fraction((position + 1) * weight, total) - counts[one] for one, weight in enumerate(weights)]
        assert all(abs(one) < 1 for one in behind), (position, behind)


@given(SHARES, st.integers(0, 5))
def test_each_prompt_of_each_task_is_visited_once_in_each_epoch_of_its_own(shares: list[TaskShare], seed: int) -> None:
    sampler = MixedSampler(shares, seed=seed)

    groups = [sampler.group_at(position) for position in range(400)]

    _are_whole_epochs(sampler, groups)


def _are_whole_epochs(sampler: Sampler, groups: list[GroupId]) -> None:
    """Hold that each task has every prompt once in each of its epochs, one epoch after another."""
    assert len(set(groups)) == len(groups)
    for pool in sampler.pools:
        own = [group for group in groups if pool.holds(group.index)]
        for start in range(0, len(own), pool.num_rows):
            epoch = own[start : start + pool.num_rows]
            assert {group.epoch for group in epoch} == {start // pool.num_rows}
            assert len({group.index for group in epoch}) == len(epoch)


def test_a_task_of_ratio_0_has_no_turn() -> None:
    sampler = sampler_of([TaskShare(3), TaskShare(4, 0.0), TaskShare(5, 2.0)], seed=1)

    assert {sampler.group_at(one).index for one in range(60)} == {0, 1, 2, 7, 8, 9, 10, 11}
    assert whole_weights([TaskShare(3), TaskShare(4, 0.0), TaskShare(1_000_000, 1e6)]) == [1, 0, MAX_PERIOD - 1]


@given(
    SHARES,
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 5), min_size=5)), max_size=8),
)
def test_after_any_changes_of_the_mix_each_task_is_visited_in_epochs_and_has_its_share_of_every_mix(
    shares: list[TaskShare], changes: list[tuple[int, int, list[int]]]
) -> None:
    """Each change is made after so many positions, for so many positions later."""
    sampler = MixedSampler(shares, seed=1)
    mixes, groups = list[Mix](), list[GroupId]()
    for num_positions, delay, wanted in changes:
        for _ in range(num_positions):
            groups.append(sampler.group_at(len(groups), mixes))
        weights = [*wanted[: len(shares) - 1], 1]
        before, start = mixes, len(groups) + delay
        mixes = sampler.remixed(mixes, weights, now=len(groups), start=start)

        assert [sampler.group_at(one, mixes) for one in range(len(groups), start)] == [
            sampler.group_at(one, before) for one in range(len(groups), start)
        ], "what comes before the change is as it was"
        assert Counter(sampler.first_groups(len(groups), mixes)) == Counter(groups)
        assert len(mixes) <= 1 + sum(one.start > len(groups) for one in mixes), "what is behind takes no room"
        total, turns = sum(weights), Counter[int]()
        for number in range(1, 30):
            group = sampler.group_at(start + number - 1, mixes)
            turns[next(task for task, pool in enumerate(sampler.pools) if pool.holds(group.index))] += 1
            if mixes[-1].start == start:
                assert all(abs(Fraction(number * weight, total) - turns[one]) < 1 for one, weight in enumerate(weights))

    _are_whole_epochs(sampler, groups)


@given(SHARES, st.integers(0, 100_000))
def test_another_mixed_sampler_goes_on_anywhere(shares: list[TaskShare], start: int) -> None:
    first, other = MixedSampler(shares, seed=1), MixedSampler(shares, seed=1)
    for position in range(20):
        first.group_at(position)

    assert [first.group_at(start + one) for one in range(20)] == [other.group_at(start + one) for one in range(20)]


def test_shares_that_seldom_meet_are_rounded_so_that_their_order_repeats_soon() -> None:
    weights = whole_weights([TaskShare(7473, 0.333), TaskShare(12_001, 1.7), TaskShare(3, 0.001)])

    assert sum(weights) <= MAX_PERIOD + 1
    assert math.isclose(weights[1] / weights[0], (12_001 * 1.7) / (7473 * 0.333), rel_tol=1e-3)
    assert whole_weights([TaskShare(1000, 3.0), TaskShare(800, 1.0)]) == [15, 4]


def test_evaluations_are_due_at_the_first_the_last_and_every_few_steps() -> None:
    due = [newest_due_step(step, every_steps=20, last_step=50) for step in (0, 19, 20, 39, 41, 50)]

    assert due == [0, 0, 20, 20, 40, 50]
    assert newest_due_step(49, every_steps=0, last_step=50) == 0


def test_the_orders_of_few_epochs_are_held_however_many_there_were() -> None:
    sampler = Sampler(10, seed=1)

    for epoch in range(200):
        sampler.group_at(10 * epoch)

    assert _permutation.cache_info().currsize <= 64
