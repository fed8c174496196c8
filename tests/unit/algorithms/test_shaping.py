"""What is added to a reward for an answer's length or form is the papers' number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.shaping import Overlong, budget_reward, format_shaped, length_rewards


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (80, 0), (85, -0.25), (100, -1), (101, -1), (999, -1)])
def test_overlong_answers_lose_along_a_line(num_tokens: int, expected: float) -> None:
    assert Overlong(max_tokens=100, cache_tokens=20).penalty(num_tokens) == pytest.approx(expected)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 500), st.floats(0.1, 3))
def test_overlong_penalty_equals_the_three_cases_of_the_paper(limit: int, cache: int, length: int, size: float) -> None:
    limit = max(limit, cache)
    if length <= limit - cache:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - cache) - length) / cache
    else:
        expected = -1.0

    assert Overlong(max_tokens=limit, cache_tokens=cache, factor=size).penalty(length) == pytest.approx(size * expected)


@pytest.mark.parametrize("cache", [0, 101])
def test_an_overlong_cache_outside_the_answer_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match=f"got a cache of {cache} tokens, need 1 to 100"):
        Overlong(max_tokens=100, cache_tokens=cache)


def test_of_right_answers_the_shorter_gains_and_wrong_ones_never_do() -> None:
    rewards = length_rewards([10, 20, 30, 10, 30], [True, True, True, False, False])

    assert rewards.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5]
    assert length_rewards([7, 7], [True, False]).tolist() == [0.0, 0.0]
    assert length_rewards([], []).tolist() == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=8))
def test_length_rewards_equal_a_plain_loop(group: list[tuple[int, bool]]) -> None:
    lengths = [length for length, _ in group]
    expected = []
    for length, is_correct in group:
        share = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths)) if len(set(lengths)) > 1 else 0.0
        expected.append(share if is_correct else min(0.0, share))

    assert length_rewards(lengths, [one for _, one in group]).tolist() == pytest.approx(expected, rel=1e-6)


@settings(deadline=None)
@given(
    st.integers(0, 5000), st.booleans(), st.integers(1, 4000), st.floats(1e-5, 1e-2), st.floats(0, 1), st.floats(-2, 2)
)
def test_budget_and_form_equal_their_formulas(
    length: int, is_right: bool, target: int, alpha: float, delta: float, reward: float
) -> None:
    budget = max(0.0, min(1.0, alpha * (target - length) + delta)) if is_right else 0.0
    form = reward + alpha if is_right else reward - delta

    assert budget_reward(length, is_right, target=target, alpha=alpha, delta=delta) == pytest.approx(budget, rel=1e-6)
    assert format_shaped(reward, is_right, bonus=alpha, penalty=delta) == pytest.approx(form, rel=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "is_correct", "expected"),
    [(1000, True, 0.5), (0, True, 0.8), (2000, True, 0.2), (9000, True, 0.0), (0, False, 0.0)],
)
def test_budget_reward_falls_with_the_tokens_over_the_target(
    num_tokens: int, is_correct: bool, expected: float
) -> None:
    assert budget_reward(num_tokens, is_correct, target=1000) == pytest.approx(expected)


def test_form_is_rewarded_beside_the_answer() -> None:
    assert format_shaped(1.0, True, bonus=0.1, penalty=0.5) == pytest.approx(1.1)
    assert format_shaped(1.0, False, bonus=0.1, penalty=0.5) == pytest.approx(0.5)
