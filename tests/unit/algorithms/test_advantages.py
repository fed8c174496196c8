"""An advantage compares a sibling with its own group and with nothing else."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.advantages import (
    STD_EPSILON,
    AdvantageRule,
    Baseline,
    Sibling,
    Spread,
    group_advantages,
    is_informative,
    process_advantages,
    returns_to_go,
    spread_over_tokens,
    step_advantages,
    turn_advantages,
    whitened,
)
from areal_async.algorithms.shaping import Overlong

siblings = st.builds(
    Sibling, reward=st.integers(-20, 20).map(lambda tenths: tenths / 10), num_tokens=st.integers(1, 40)
)
steps = st.lists(st.lists(siblings, min_size=1, max_size=6), min_size=1, max_size=5)
turns = st.lists(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=5), min_size=1, max_size=5)
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


@settings(deadline=None)
@given(rewards, st.booleans())
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(group: list[float], std: bool) -> None:
    advantages = group_advantages(group, std=std).astype(np.float64)

    assert abs(advantages.sum()) <= 1e-5 * max(1.0, np.abs(advantages).sum())
    assert (np.diff(advantages[np.argsort(group)]) >= 0).all()


@settings(deadline=None)
@given(rewards.filter(lambda group: max(group) - min(group) > 1e-2), st.floats(0.5, 10))
def test_with_std_the_scale_of_rewards_does_not_matter(group: list[float], scale: float) -> None:
    scaled = [reward * scale for reward in group]

    assert group_advantages(scaled, std=True) == pytest.approx(group_advantages(group, std=True), rel=1e-2, abs=1e-4)


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    rule = AdvantageRule(baseline="leave_one_out", std="none")
    groups = [[Sibling(reward=reward) for reward in rewards] for rewards in ([1.0, 0.0, 0.0, 0.0], [2.0])]

    four, alone = step_advantages(groups, rule)

    assert four == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert alone.tolist() == [0.0]


def reference_step(
    groups: list[list[Sibling]], baseline: Baseline, std: Spread, overlong: Overlong | None
) -> list[list[float]]:
    """Sibling by sibling, with the standard library's statistics."""
    shaped = [
        [one.reward + (overlong.penalty(one.num_tokens) if overlong else 0.0) for one in group] for group in groups
    ]
    centred: list[list[float]] = []
    for group in shaped:
        values = []
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            if baseline == "none":
                values.append(reward)
            elif not others:
                values.append(0.0)
            elif baseline == "group":
                values.append(reward - statistics.fmean(group))
            else:
                values.append(reward - statistics.fmean(others))
        centred.append(values)
    if std == "none":
        return centred
    if std == "batch":
        tokens = [
            value
            for group, values in zip(groups, centred, strict=True)
            for sibling, value in zip(group, values, strict=True)
            for _ in range(sibling.num_tokens)
        ]
        mean, spread = statistics.fmean(tokens), statistics.pstdev(tokens)
        return [[(value - mean) / (spread + STD_EPSILON) for value in values] for values in centred]
    everyone = [reward for group in shaped for reward in group]
    result = []
    for group, values in zip(shaped, centred, strict=True):
        sample = group if std == "group" else everyone
        spread = statistics.stdev(sample) if len(set(sample)) > 1 else math.inf
        result.append([value / (spread + STD_EPSILON) for value in values])
    return result


@settings(deadline=None)
@given(
    steps,
    st.sampled_from(["group", "leave_one_out", "none"]),
    st.sampled_from(["group", "batch", "batch_reward", "none"]),
    st.sampled_from([None, Overlong(max_tokens=40, cache_tokens=20)]),
)
def test_every_rule_equals_a_plain_loop_over_the_step(
    groups: list[list[Sibling]], baseline: Baseline, std: Spread, overlong: Overlong | None
) -> None:
    advantages = step_advantages(groups, AdvantageRule(baseline=baseline, std=std, overlong=overlong))

    for values, expected in zip(advantages, reference_step(groups, baseline, std, overlong), strict=True):
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_todays_rule_gives_bit_for_bit_what_a_group_alone_gives() -> None:
    groups = [[Sibling(reward=reward) for reward in group] for group in ([1.0, 0.3, 0.0], [0.7, 0.7], [0.1, 0.9])]

    for std in (True, False):
        values = step_advantages(groups, AdvantageRule(std="group" if std else "none"))
        for one, group in zip(values, groups, strict=True):
            assert one.tolist() == group_advantages([sibling.reward for sibling in group], std=std).tolist()


def test_a_step_without_groups_has_no_advantages() -> None:
    for std in ("group", "batch", "batch_reward", "none"):
        assert step_advantages([], AdvantageRule(std=std)) == []  # type: ignore[arg-type]


def test_whitening_weighs_a_sequence_by_its_tokens() -> None:
    # Three tokens of 1 and one of -3: mean 0, variance (3 + 9) / 4 = 3.
    values = whitened(np.array([1.0, -3.0]), np.array([3.0, 1.0]))

    assert values == pytest.approx([1 / math.sqrt(3), -3 / math.sqrt(3)], rel=1e-5)
    assert whitened(np.array([0.1, 0.1]), np.array([1.0, 5.0])).tolist() == [0.0, 0.0]


def test_a_group_informs_when_its_rewards_differ() -> None:
    assert is_informative([0.0, 1.0, 0.0])
    assert not is_informative([1.0, 1.0])
    assert not is_informative([1.0])


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0, 1))
def test_returns_add_up_what_comes_later(rewards_K: list[float], gamma: float) -> None:
    expected = [
        sum(gamma ** (later - turn) * rewards_K[later] for later in range(turn, len(rewards_K)))
        for turn in range(len(rewards_K))
    ]

    assert returns_to_go(rewards_K, gamma=gamma) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(turns)
def test_process_advantages_equal_a_plain_loop(group: list[list[float]]) -> None:
    flat = [reward for sibling in group for reward in sibling]
    spread = statistics.stdev(flat) if len(set(flat)) > 1 else math.inf
    expected = [
        [
            sum((reward - statistics.fmean(flat)) / (spread + STD_EPSILON) for reward in sibling[turn:])
            for turn in range(len(sibling))
        ]
        for sibling in group
    ]

    for values, wanted in zip(process_advantages(group), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(turns, st.sampled_from([1.0, 0.9, 0.0]), st.booleans())
def test_turn_advantages_compare_the_same_turn_of_those_who_have_it(
    group: list[list[float]], gamma: float, std: bool
) -> None:
    values = turn_advantages(group, gamma=gamma, std=std)

    for place, sibling in enumerate(group):
        for turn in range(len(sibling)):
            peers = [
                sum(gamma**ahead * reward for ahead, reward in enumerate(other[turn:]))
                for other in group
                if len(other) > turn
            ]
            mine = sum(gamma**ahead * reward for ahead, reward in enumerate(sibling[turn:]))
            is_flat = len(peers) < 2 or max(peers) - min(peers) < 1e-9
            scale = statistics.stdev(peers) + STD_EPSILON if std and not is_flat else 1.0
            if not is_flat:
                assert values[place][turn] == pytest.approx(
                    (mine - statistics.fmean(peers)) / scale, rel=1e-6, abs=1e-6
                )


def test_with_one_turn_each_turn_credit_is_grpo() -> None:
    values = turn_advantages([[1.0], [0.0], [0.0]], std=True)

    assert [one.tolist() for one in values] == [[one] for one in group_advantages([1.0, 0.0, 0.0], std=True).tolist()]


def test_tokens_carry_the_value_of_their_turn_and_others_none() -> None:
    values = spread_over_tokens(np.array([2.0, -1.0], dtype=np.float32), np.array([-1, 0, 0, -1, 1]))

    assert values.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0]
