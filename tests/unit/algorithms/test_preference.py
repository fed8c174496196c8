"""Losses on pairs equal their formulas in plain floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.preference import bradley_terry_loss, dpo_loss
from areal_async.algorithms.sequences import sequence_sums

numbers = st.floats(-20, 0)
pairs = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=6)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(pairs, st.sampled_from([0.1, 0.5]), st.sampled_from([0.0, 0.1]))
@settings(deadline=None)
def test_dpo_equals_its_formula(answers: list[tuple[float, float, float, float]], beta: float, noise: float) -> None:
    losses = []
    for chosen, rejected, reference_chosen, reference_rejected in answers:
        margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        losses.append(-(1 - noise) * math.log(logistic(margin)) - noise * math.log(logistic(-margin)))
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*answers, strict=True)]

    loss = dpo_loss(*columns, beta=beta, label_smoothing=noise)

    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
@settings(deadline=None)
def test_bradley_terry_equals_its_formula(scores: list[tuple[float, float]]) -> None:
    losses = [-math.log(logistic(chosen - rejected)) for chosen, rejected in scores]
    chosen, rejected = (torch.tensor(column, dtype=torch.float64) for column in zip(*scores, strict=True))

    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(sum(losses) / len(losses), rel=1e-6, abs=1e-9)


def test_preference_losses_pass_gradcheck_and_leave_the_reference_alone() -> None:
    chosen, rejected, one, two = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4))

    assert torch.autograd.gradcheck(
        lambda a, b: dpo_loss(a, b, one.detach(), two.detach(), beta=0.3), (chosen, rejected)
    )
    assert torch.autograd.gradcheck(bradley_terry_loss, (chosen, rejected))
    dpo_loss(chosen, rejected, one, two, beta=0.3).backward()
    assert one.grad is None
    assert two.grad is None


def test_answers_that_equal_the_reference_start_at_log_two() -> None:
    same = torch.tensor([-3.0, -4.0])

    assert dpo_loss(same, same, same, same, beta=0.1).item() == pytest.approx(math.log(2))
    assert bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0])).item() == pytest.approx(-math.log(logistic(1)))


def test_the_likelihood_of_an_answer_is_summed_over_its_own_tokens() -> None:
    logprobs, mask = torch.tensor([-1.0, -2.0, -4.0, -8.0]), torch.tensor([False, True, True, True])

    assert sequence_sums(logprobs, mask, torch.tensor([0, 0, 1, 1]))[:2].tolist() == [-2.0, -12.0]
