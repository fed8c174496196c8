"""Distances to the reference: their estimates, their place in loss or reward, and no zeros where there is none."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.kl import ESTIMATORS, kl_estimate, kl_rewards, last_token_rewards, sequence_kl
from areal_async.algorithms.values import reward_to_go

MASK = torch.tensor([False, True, True, False, True, True, False])
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1])


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_estimates_equal_their_formulas(name: str, formula: object) -> None:
    distances = [-1.5, -0.1, 0.0, 1e-4, 0.7]

    assert ESTIMATORS[name](doubles(*distances)).tolist() == pytest.approx(
        [formula(d) for d in distances],  # type: ignore[operator]
        rel=1e-6,
        abs=1e-12,
    )


def test_estimates_are_bounded_and_finite_however_far_a_reference_is() -> None:
    for name, estimate in ESTIMATORS.items():
        far = doubles(-math.inf, -90.0, 90.0, math.inf).requires_grad_()
        found = estimate(far)
        (gradient,) = torch.autograd.grad(found.sum(), far)
        assert found.abs().tolist() == [10.0] * 4, name
        assert gradient.tolist() == [0.0] * 4, name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_pass_gradcheck(name: str) -> None:
    assert torch.autograd.gradcheck(ESTIMATORS[name], (doubles(-1.5, 0.2, 0.9).requires_grad_(),))


def test_unbiased_estimates_have_the_mean_of_the_divergence() -> None:
    policy, reference = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.2, 0.6)
    divergence = (policy * (policy / reference).log()).sum().item()

    for name in ("k1", "k3"):
        assert (policy * ESTIMATORS[name]((policy / reference).log())).sum().item() == pytest.approx(divergence)


def test_on_policy_the_gradient_of_k2_is_the_divergences_and_that_of_k1_is_zero() -> None:
    logits, reference = doubles(0.3, -0.2, 0.9).requires_grad_(), doubles(0.2, 0.2, 0.6)
    policy = logits.softmax(0)
    (exact,) = torch.autograd.grad((policy * (policy / reference).log()).sum(), logits)

    for name, expected in (("k2", exact), ("k1", torch.zeros(3, dtype=torch.float64))):
        logprobs = logits.log_softmax(0)
        sampled = (logprobs.exp().detach() * ESTIMATORS[name](logprobs - reference.log())).sum()
        (gradient,) = torch.autograd.grad(sampled, logits)
        assert torch.allclose(gradient, expected, atol=1e-12)


def test_a_missing_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="got no reference logprobs, need those of a reference model"):
        kl_estimate(doubles(-1.0), None, torch.tensor([True]), estimator="k3")


def test_an_outcome_stands_on_the_last_sampled_token() -> None:
    rewards = last_token_rewards(doubles(2.0, -1.0), MASK, SEQUENCE)

    assert rewards.tolist() == [0, 0, 2, 0, 0, -1, 0]


def test_a_distance_in_the_reward_is_taken_off_each_token_and_lowers_those_before_it() -> None:
    kl = doubles(9, 1, 2, 9, 3, 4, 9).requires_grad_()
    rewards = kl_rewards(last_token_rewards(doubles(2.0, -1.0), MASK, SEQUENCE), kl, MASK, kl_coef=0.1)

    assert rewards.tolist() == pytest.approx([0, -0.1, 1.8, 0, -0.3, -1.4, 0])
    assert not rewards.requires_grad
    # REINFORCE++: r - beta * (this token's distance and those of all later ones).
    assert reward_to_go(rewards, MASK, SEQUENCE).tolist() == pytest.approx([0, 1.7, 1.8, 0, -1.7, -1.4, 0])
    assert sequence_kl(kl, MASK, SEQUENCE)[:2].tolist() == [3, 7]


tokens = st.tuples(st.floats(0, 3), st.booleans())
sequences = st.lists(st.lists(tokens, min_size=1, max_size=6).filter(lambda one: one[-1][1]), min_size=1, max_size=4)


@settings(deadline=None)
@given(sequences, st.lists(st.floats(-2, 2), min_size=4, max_size=4), st.floats(0, 1))
def test_penalised_rewards_equal_plain_loops_over_packed_sequences(
    drawn: list[list[tuple[float, bool]]], outcomes: list[float], kl_coef: float
) -> None:
    flat = [token for one in drawn for token in one]
    kl, mask = doubles(*(kl for kl, _ in flat)), torch.tensor([is_trained for _, is_trained in flat])
    number = torch.tensor([place for place, one in enumerate(drawn) for _ in one])
    expected, totals, returns = [], [], []
    for one, outcome in zip(drawn, outcomes, strict=False):
        own = [(outcome if place == len(one) - 1 else 0.0) - kl_coef * kl for place, (kl, _) in enumerate(one)]
        own = [reward if is_trained else 0.0 for reward, (_, is_trained) in zip(own, one, strict=True)]
        expected += own
        returns += [sum(own[place:]) if is_trained else 0.0 for place, (_, is_trained) in enumerate(one)]
        totals.append(sum(kl for kl, is_trained in one if is_trained))

    rewards = kl_rewards(last_token_rewards(doubles(*outcomes), mask, number), kl, mask, kl_coef=kl_coef)

    assert rewards.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert reward_to_go(rewards, mask, number).tolist() == pytest.approx(returns, rel=1e-6, abs=1e-9)
    assert sequence_kl(kl, mask, number)[: len(drawn)].tolist() == pytest.approx(totals, rel=1e-6, abs=1e-9)
