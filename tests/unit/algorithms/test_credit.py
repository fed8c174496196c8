"""Advantages of single replies: every algorithm's own rule, over the credited replies of one role."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.advantages import STD_EPSILON, AdvantageRule, CreditName, Sibling, step_advantages
from areal_async.algorithms.credit import has_differing_replies, reply_advantages
from areal_async.algorithms.shaping import Overlong
from areal_async.protocol.types import ReplyReward

ROLES = ("", "proposer", "solver")
tenths = st.integers(-20, 20).map(lambda value: value / 10)
credits = st.builds(ReplyReward, tenths, st.integers(1, 30), st.sampled_from(ROLES))


@st.composite
def siblings(draw: st.DrawFn) -> Sibling:
    """With credits or without."""
    given_credits = tuple(draw(st.lists(credits, max_size=4)))
    num_tokens = sum(one.num_tokens for one in given_credits) + draw(st.integers(1, 10))
    return Sibling(reward=draw(tenths), num_tokens=num_tokens, credits=given_credits)


steps = st.lists(st.lists(siblings(), min_size=1, max_size=4), min_size=1, max_size=3)
rules = st.builds(
    AdvantageRule,
    baseline=st.sampled_from(["group", "leave_one_out", "none"]),
    std=st.sampled_from(["group", "batch", "batch_reward", "none"]),
    overlong=st.sampled_from([None, Overlong(max_tokens=60, cache_tokens=40, factor=0.5)]),
)


def reference(step: list[list[Sibling]], rule: AdvantageRule) -> list[list[list[float]]]:
    """Reply by reply in float64, by plain loops over everybody it is compared with."""
    replies: list[tuple[int, int, int, str, float, int]] = []
    for g, group in enumerate(step):
        for s, sibling in enumerate(group):
            given_credits = sibling.credits or (ReplyReward(sibling.reward, sibling.num_tokens),)
            for k, credit in enumerate(given_credits):
                value = credit.reward
                if rule.overlong is not None:
                    value = value + rule.overlong.penalty(sibling.num_tokens)
                replies.append((g, s, k, credit.role, value, credit.num_tokens))

    def centred(mine: tuple[int, int, int, str, float, int]) -> float:
        g, _, _, role, value, _ = mine
        group = [one[4] for one in replies if one[0] == g and one[3] == role]
        if rule.baseline == "none":
            return value
        if len(set(group)) == 1:
            return 0.0
        total = 0.0
        for other in group:
            total += other
        if rule.baseline == "leave_one_out":
            return value - (total - value) / (len(group) - 1)
        return value - total / len(group)

    def deviation(values: list[float]) -> float:
        if len(set(values)) < 2:
            return 0.0
        middle = sum(values) / len(values)
        return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))

    results = [[[0.0] * max(1, len(sibling.credits)) for sibling in group] for group in step]
    for mine in replies:
        g, s, k, role, _, _ = mine
        of_role = [one for one in replies if one[3] == role]
        value = centred(mine)
        if rule.std in ("group", "batch_reward"):
            among = [one[4] for one in of_role if one[0] == g or rule.std == "batch_reward"]
            spread = deviation(among)
            value = value / (spread + STD_EPSILON) if spread else 0.0
        elif rule.std == "batch":
            tokens = [centred(one) for one in of_role for _ in range(one[5])]
            middle = sum(tokens) / len(tokens)
            spread = math.sqrt(sum((one - middle) ** 2 for one in tokens) / len(tokens))
            # Of equal values the code says exactly 0; the deviation of these is rounding alone.
            value = (value - middle) / (spread + STD_EPSILON) if spread > 1e-9 else 0.0
        results[g][s][k] = value
    return results


@settings(deadline=None, max_examples=300)
@given(steps, rules)
def test_every_reply_gets_what_plain_loops_over_its_role_say(step: list[list[Sibling]], rule: AdvantageRule) -> None:
    got = reply_advantages(step, rule)

    for mine, theirs in zip(got, reference(step, rule), strict=True):
        for values, expected in zip(mine, theirs, strict=True):
            assert values == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.builds(Sibling, reward=tenths, num_tokens=st.integers(1, 40)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    rules,
)
def test_without_credits_it_is_bit_for_bit_what_outcomes_give(step: list[list[Sibling]], rule: AdvantageRule) -> None:
    values = reply_advantages(step, rule)

    for mine, theirs in zip(values, step_advantages(step, rule), strict=True):
        assert np.concatenate(mine).tobytes() == theirs.tobytes()


def test_a_group_that_credits_its_second_replies_compares_them_alone() -> None:
    group = [Sibling(reward=value, credits=(ReplyReward(value, 3),)) for value in (1.0, 0.0)]

    ((first, second),) = reply_advantages([group], AdvantageRule(std="none"))

    assert (first.tolist(), second.tolist()) == ([0.5], [-0.5])


def test_the_discount_of_a_workflow_is_the_only_one() -> None:
    # Solved at the second try with a discount of 0.5, and at the first: returns 0.5, 1 and 1; their mean is 5/6.
    group = [
        Sibling(reward=0.75, credits=(ReplyReward(0.5, 2), ReplyReward(1.0, 2))),
        Sibling(reward=1, credits=(ReplyReward(1, 2),)),
    ]

    ((late, early),) = reply_advantages([group], AdvantageRule(std="none"))

    assert late == pytest.approx([-1 / 3, 1 / 6])
    assert early == pytest.approx([1 / 6])


@settings(deadline=None)
@given(steps, st.sampled_from(["process", "turns"]), st.booleans(), st.sampled_from([1.0, 0.5]))
def test_rewards_of_steps_are_compared_role_by_role_within_their_group(
    step: list[list[Sibling]], credit: CreditName, is_long: bool, gamma: float
) -> None:
    overlong = Overlong(max_tokens=60, cache_tokens=40, factor=0.5) if is_long else None
    rule = AdvantageRule(credit=credit, overlong=overlong, gamma=gamma)

    for group, values in zip(step, reply_advantages(step, rule), strict=True):
        for role in ROLES:
            rewards = []
            for sibling in group:
                own = [one.reward for one in sibling.credits or [ReplyReward(sibling.reward, 1)] if one.role == role]
                if own and overlong is not None:
                    own[-1] += overlong.penalty(sibling.num_tokens)
                rewards.append(own)
            expected = process_rewards(rewards) if credit == "process" else turn_rewards(rewards, gamma)
            for sibling, got, wanted in zip(group, values, expected, strict=True):
                roles = [one.role for one in sibling.credits] or [""]
                mine = [float(value) for value, one in zip(got, roles, strict=True) if one == role]
                assert mine == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def process_rewards(rewards: list[list[float]]) -> list[list[float]]:
    """Reply by reply in float64: the normalised rewards from this one on."""
    every = [reward for own in rewards for reward in own]
    if len(set(every)) < 2:
        return [[0.0] * len(own) for own in rewards]
    mean, spread = statistics.fmean(every), statistics.stdev(every) + STD_EPSILON
    return [[sum((later - mean) / spread for later in own[k:]) for k in range(len(own))] for own in rewards]


def turn_rewards(rewards: list[list[float]], gamma: float) -> list[list[float]]:
    """Reply by reply in float64: its return against those of the same turn of others."""
    returns = [
        [sum(gamma**ahead * reward for ahead, reward in enumerate(own[k:])) for k in range(len(own))] for own in rewards
    ]
    result = [[0.0] * len(own) for own in rewards]
    for turn in range(max(map(len, rewards))):
        peers = [own[turn] for own in returns if len(own) > turn]
        if len(peers) > 1 and max(peers) - min(peers) > 1e-9:
            spread = statistics.stdev(peers) + STD_EPSILON
            for own, values in zip(returns, result, strict=True):
                if len(own) > turn:
                    values[turn] = (own[turn] - statistics.fmean(peers)) / spread
    return result


def test_process_supervision_lifts_the_steps_before_a_good_one() -> None:
    group = [
        Sibling(reward=0.5, credits=(ReplyReward(0.0, 1), ReplyReward(1.0, 1))),
        Sibling(reward=0.0, credits=(ReplyReward(0.0, 1), ReplyReward(0.0, 1))),
    ]

    ((good, bad),) = reply_advantages([group], AdvantageRule(credit="process"))

    # Mean 1/4, sample deviation 1/2: steps are worth -1/2 or 3/2.
    assert good.tolist() == pytest.approx([1.0, 1.5], abs=1e-5)
    assert bad.tolist() == pytest.approx([-1.0, -0.5], abs=1e-5)


@pytest.mark.parametrize(
    ("group", "teaches"),
    [
        ([Sibling(reward=0.5, credits=(ReplyReward(0, 1), ReplyReward(1, 1))), Sibling(reward=0.5)], True),
        ([Sibling(reward=0.5, credits=(ReplyReward(0, 1, "a"), ReplyReward(1, 1, "b")))] * 2, False),
        ([Sibling(reward=0.5), Sibling(reward=0.5)], False),
        ([Sibling(reward=0.5), Sibling(reward=0.25)], True),
    ],
)
def test_a_group_teaches_where_replies_of_one_role_differ(group: list[Sibling], teaches: bool) -> None:
    assert has_differing_replies(group) is teaches
    advantages = np.concatenate(reply_advantages([group], AdvantageRule())[0])
    assert bool(advantages.any()) is teaches
