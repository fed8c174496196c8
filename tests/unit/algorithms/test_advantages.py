"""An advantage compares a sibling with its own group and with nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.algorithms.advantages import group_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_advantages_equal_the_numbers_worked_out_on_paper() -> None:
    # mean 0.25, deviations 0.75 and three times -0.25, standard deviation sqrt(0.75 / 3) = 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0], std=True) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_without_std_only_the_mean_is_taken_off() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("group", [[0.1] * 7, [0.0, 0.0], [3.3]])
def test_a_group_with_equal_rewards_gives_exact_zeros(group: list[float], std: bool) -> None:
    assert group_advantages(group, std=std).tolist() == [0.0] * len(group)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="need finite numbers"):
        group_advantages([1.0, reward], std=True)


@given(rewards, st.booleans())
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(group: list[float], std: bool) -> None:
    advantages = group_advantages(group, std=std).astype(np.float64)

    assert abs(advantages.sum()) <= 1e-5 * max(1.0, np.abs(advantages).sum())
    assert (np.diff(advantages[np.argsort(group)]) >= 0).all()


@given(rewards.filter(lambda group: max(group) - min(group) > 1e-2), st.floats(0.5, 10))
def test_with_std_the_scale_of_rewards_does_not_matter(group: list[float], scale: float) -> None:
    scaled = [reward * scale for reward in group]

    assert group_advantages(scaled, std=True) == pytest.approx(group_advantages(group, std=True), rel=1e-2, abs=1e-4)
