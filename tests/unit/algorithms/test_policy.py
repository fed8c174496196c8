"""The policy loss is the papers' formula, token for token, and nothing outside the mask can reach it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.algorithms.objective import ScoredTokens
from tests.unit.algorithms.losses import policy_loss


def tokens_of(logprobs: Tensor, **given: Any) -> ScoredTokens:
    """Complete the tensors of a loss: on-policy and unmasked where nothing else is given."""
    size = logprobs.shape
    defaults = {
        "entropy_T": torch.zeros(size, dtype=logprobs.dtype),
        "start_T": logprobs.detach(),
        "behave_T": logprobs.detach(),
        "advantages_T": torch.ones(size, dtype=logprobs.dtype),
        "mask_T": torch.ones(size, dtype=torch.bool),
        "current_T": torch.ones(size, dtype=torch.bool),
    }
    return ScoredTokens(logprobs_T=logprobs, **defaults | given)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_tokens(count: int = 64, seed: int = 0) -> ScoredTokens:
    torch.manual_seed(seed)
    start = -torch.rand(count, dtype=torch.float64) * 3
    return tokens_of(
        (start + 0.3 * torch.randn(count, dtype=torch.float64)).requires_grad_(),
        entropy_T=torch.rand(count, dtype=torch.float64).requires_grad_(),
        start_T=start,
        behave_T=start + torch.randn(count, dtype=torch.float64),
        advantages_T=torch.randn(count, dtype=torch.float64),
        mask_T=torch.rand(count) < 0.7,
        current_T=torch.rand(count) < 0.5,
    )


def reference_loss(tokens: ScoredTokens, low: float, high: float, cap: float | None, entropy_coef: float) -> float:
    """AReaL eq. 5 (or PPO's loss without a cap), one token at a time, in plain floats."""
    total = 0.0
    for i in torch.nonzero(tokens.mask_T).flatten().tolist():
        logprob, start, behave = (x[i].item() for x in (tokens.logprobs_T, tokens.start_T, tokens.behave_T))
        advantage, entropy = tokens.advantages_T[i].item(), tokens.entropy_T[i].item()
        ratio = math.exp(logprob - (behave if cap is None else start))
        weight = 1.0 if cap is None else min(math.exp(start - behave), cap)
        clipped = min(max(ratio, 1 - low), 1 + high)
        total -= weight * min(ratio * advantage, clipped * advantage) + entropy_coef * entropy
    return total


def test_three_tokens_equal_the_sum_worked_out_on_paper() -> None:
    # Ratios 1.5, 0.5 and 1.1 clip to 1.2, 0.8 and 1.1; behaviour weights 2, 0.5 and 10, the last cut to 5.
    # -(2 * min(1.5, 1.2) * 1) = -2.4; -(0.5 * min(0.5 * -2, 0.8 * -2)) = 0.8; -(5 * 1.1 * 0.1) = -0.55
    start = doubles(-1.0, -2.0, -3.0)
    tokens = tokens_of(
        start + doubles(1.5, 0.5, 1.1).log(),
        start_T=start,
        behave_T=start - doubles(2.0, 0.5, 10.0).log(),
        advantages_T=doubles(1.0, -2.0, 0.1),
    )

    terms = policy_loss(tokens, eps_clip=0.2, behave_weight_cap=5.0)

    assert terms.loss.item() == pytest.approx(-2.4 + 0.8 - 0.55)
    assert terms.sums["clipped"].item() == 2
    assert terms.sums["behave_weight"].item() == pytest.approx(2 + 0.5 + 5)
    assert terms.maxima["behave_weight"].item() == pytest.approx(5)
    assert terms.maxima["ratio"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("cap", [None, 5.0, 1.0])
@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_loss_equals_the_formula_in_plain_floats(cap: float | None, high: float | None, entropy_coef: float) -> None:
    tokens = random_tokens()

    terms = policy_loss(tokens, eps_clip=0.2, eps_clip_higher=high, behave_weight_cap=cap, entropy_coef=entropy_coef)

    assert terms.loss.item() == pytest.approx(reference_loss(tokens, 0.2, high or 0.2, cap, entropy_coef), rel=1e-12)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_gradient_equals_finite_differences(cap: float | None) -> None:
    tokens = random_tokens(count=12)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        moved = replace(tokens, logprobs_T=logprobs, entropy_T=entropy)
        return policy_loss(moved, eps_clip=0.2, behave_weight_cap=cap, entropy_coef=0.1).loss

    assert torch.autograd.gradcheck(loss, (tokens.logprobs_T, tokens.entropy_T))


def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient() -> None:
    logprobs = doubles(-0.5, -1.0, -4.0).requires_grad_()
    advantages = doubles(1.0, -2.0, 0.5)

    policy_loss(tokens_of(logprobs, advantages_T=advantages), eps_clip=0.2, behave_weight_cap=5.0).loss.backward()

    assert torch.equal(logprobs.grad, -advantages)  # type: ignore[arg-type]


def test_without_decoupling_the_ratio_is_taken_against_the_server() -> None:
    tokens = tokens_of(doubles(-1.0), start_T=doubles(-9.0), behave_T=doubles(-1.0) - doubles(1.1).log())

    terms = policy_loss(tokens, eps_clip=0.2)

    assert terms.sums["ratio"].item() == pytest.approx(1.1)
    assert terms.sums["behave_weight"].item() == 1


def test_no_gradient_flows_through_the_start_logprobs() -> None:
    start = doubles(-1.0, -2.0).requires_grad_()
    tokens = tokens_of(doubles(-1.1, -2.1).requires_grad_(), start_T=start, behave_T=doubles(-2.0, -1.0))

    policy_loss(tokens, eps_clip=0.2, behave_weight_cap=5.0).loss.backward()

    assert start.grad is None


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_whatever_stands_outside_the_mask_changes_neither_loss_nor_gradient(garbage: float, cap: float | None) -> None:
    mask = torch.tensor([True, False])
    logprobs = doubles(-1.0, -2.0).requires_grad_()
    tokens = tokens_of(
        logprobs, start_T=doubles(-1.2, -2.0), behave_T=doubles(-1.1, garbage), mask_T=mask,
        advantages_T=doubles(1.0, garbage),
    )  # fmt: skip
    alone = policy_loss(
        tokens_of(doubles(-1.0), start_T=doubles(-1.2), behave_T=doubles(-1.1)), eps_clip=0.2, behave_weight_cap=cap
    )

    terms = policy_loss(tokens, eps_clip=0.2, behave_weight_cap=cap)
    terms.loss.backward()

    assert terms.loss.item() == alone.loss.item()
    assert {name: value.item() for name, value in terms.sums.items()} == {
        name: value.item() for name, value in alone.sums.items()
    }
    assert logprobs.grad is not None
    assert logprobs.grad[1] == 0
    assert torch.isfinite(logprobs.grad).all()


def test_gap_of_the_start_version_counts_its_own_tokens_only() -> None:
    start = doubles(-1.0, -1.0, -1.0)
    tokens = tokens_of(start, behave_T=start - doubles(0.1, -0.3, 2.0), current_T=torch.tensor([True, True, False]))

    terms = policy_loss(tokens, eps_clip=0.2, behave_weight_cap=5.0)

    assert terms.sums["current"].item() == 2
    assert terms.sums["current_gap"].item() == pytest.approx(0.4)
    assert terms.sums["gap"].item() == pytest.approx(2.4)
    assert terms.maxima["current_gap"].item() == pytest.approx(0.3)
    assert terms.maxima["current_ratio_deviation"].item() == pytest.approx(1 - math.exp(-0.3))


def test_likelihood_is_the_negative_sum_of_the_masked_logprobs() -> None:
    logprobs = doubles(-1.0, -2.0, -4.0).requires_grad_()

    terms = likelihood_loss(tokens_of(logprobs, mask_T=torch.tensor([True, False, True])))
    terms.loss.backward()

    assert terms.loss.item() == 5.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0, -1.0]
