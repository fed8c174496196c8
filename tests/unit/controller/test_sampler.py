"""Each prompt has one place per epoch, the order is a function of the seed, and position is all the state."""

from hypothesis import given
from hypothesis import strategies as st

from areal_async.controller.evaluation import newest_due_step
from areal_async.controller.sampler import Sampler


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 5))
def test_an_epoch_visits_every_row_once(num_rows: int, epoch: int, seed: int) -> None:
    sampler = Sampler(num_rows, seed=seed)

    groups = [sampler.group_at(epoch * num_rows + offset) for offset in range(num_rows)]

    assert sorted(group.index for group in groups) == list(range(num_rows))
    assert {group.epoch for group in groups} == {epoch}


def test_another_sampler_of_the_same_seed_goes_on_where_the_first_stopped() -> None:
    first = [Sampler(10, seed=7).group_at(position) for position in range(25)]

    assert [Sampler(10, seed=7).group_at(position) for position in range(25)] == first


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [Sampler(40, seed=seed).group_at(epoch * 40 + offset).index for offset in range(40)]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_evaluations_are_due_at_the_first_the_last_and_every_few_steps() -> None:
    due = [newest_due_step(step, every_steps=20, last_step=50) for step in (0, 19, 20, 39, 41, 50)]

    assert due == [0, 0, 20, 20, 40, 50]
    assert newest_due_step(49, every_steps=0, last_step=50) == 0
