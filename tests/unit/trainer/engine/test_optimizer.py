"""The learning rate is a function of the step alone, and weight decay touches matrices only."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from areal_async.config.settings import TrainerSettings
from areal_async.config.sft import SftTrainerSettings
from areal_async.trainer.engine.optimizer import learning_rate, make_optimizer


def rates(total_steps: int, **settings: object) -> list[float]:
    trainer = TrainerSettings.model_validate({"lr": 1.0, **settings})
    return [learning_rate(step, total_steps=total_steps, trainer=trainer) for step in range(1, total_steps + 1)]


def test_rate_rises_evenly_to_its_peak_and_stays() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_rate_falls_from_its_peak_and_would_be_zero_after_the_last_step() -> None:
    assert rates(6, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_rate_is_half_its_peak_in_the_middle_and_never_zero() -> None:
    falling = rates(8, schedule="cosine")

    assert falling[0] == 1.0
    assert falling[4] == pytest.approx(0.5)
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] > 0


def test_weight_decay_shrinks_matrices_and_leaves_vectors() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)

    make_optimizer([matrix, vector], TrainerSettings(lr=0.5, weight_decay=0.1)).step()

    assert matrix.detach().flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [TrainerSettings, SftTrainerSettings])
@pytest.mark.parametrize("betas", [(2, 2), (0.9, 1), (-0.1, 0.95), (0.9,)])
def test_betas_that_adamw_refuses_are_refused_with_the_settings(
    kind: type[TrainerSettings | SftTrainerSettings], betas: tuple[float, ...]
) -> None:
    with pytest.raises(ValidationError, match="betas"):
        kind.model_validate({"betas": betas})


@pytest.mark.parametrize("edge", [{"betas": (0, 0)}, {"eps": 1e-37}, {"weight_decay": 0}, {"warmup_steps": 0}])
def test_adamw_takes_the_outermost_settings(edge: dict[str, Any]) -> None:
    """And a weight without a gradient stays what it is."""
    weights = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([weights], TrainerSettings.model_validate(edge))
    weights.grad = torch.tensor([[0.0, 1.0], [0.0, 1.0]])

    optimizer.step()

    assert weights[:, 0].tolist() == [1.0, 1.0]
    assert weights.isfinite().all()


def test_an_epsilon_that_float32_does_not_hold_is_refused() -> None:
    with pytest.raises(ValidationError, match="eps"):
        TrainerSettings(eps=1e-46)
