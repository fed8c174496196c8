"""The engine trains what a preset says: its aggregation, its ratio and its batch-wide mask, however rows are packed."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.config.algorithm import PRESETS
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows

ALGORITHMS: list[dict[str, Any]] = [
    *({"name": name} for name in PRESETS),
    {"correction": "reject_sequence", "behave_weight_cap": 1.2, "behave_weight_floor": 0.8, "num_minibatches": 2},
    {"ratio_level": "sequence_token", "aggregation": "sequence_mean", "num_minibatches": 2},
    {"proximal": "loglinear", "num_minibatches": 2},
]


def _rows(count: int) -> list[Any]:
    return [replace(row, ages=np.arange(row.num_tokens) % 3) for row in random_rows(count)]


def _token_advantages(rows: list[Any]) -> list[Any]:
    """Give every token an advantage of its own, as a critic or the credit of replies does."""
    random = np.random.default_rng(1)
    return [replace(row, advantage=random.normal(size=row.num_tokens).astype(np.float32)) for row in rows]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: "-".join(map(str, one.values())))
def test_a_step_of_a_preset_is_the_same_however_rows_are_packed(
    algorithm: dict[str, Any], model: Path, ranks: Ranks
) -> None:
    # AdamW divides a gradient by its own size, so that one which is nearly 0 is rounding at the scale of the learning
    # rate. A larger epsilon keeps such a parameter where it is.
    packed, alone = (
        engine_of(model, ranks, algorithm=algorithm, token_budget=budget, eps=1e-3) for budget in (4096, 24)
    )

    stats = packed.train_step(_rows(10), step=1, total_steps=1)
    stats_alone = alone.train_step(_rows(10)[::-1], step=1, total_steps=1)

    assert asdict(stats) == pytest.approx(asdict(stats_alone), rel=1e-4, abs=1e-5)
    assert stats.loss == pytest.approx(stats_alone.loss, rel=1e-5, abs=1e-6)
    assert stats.grad_norm > 0
    assert parameters_differ(packed, alone) < 4e-3 * 1e-2 * stats.num_updates


@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_of_a_preset_is_that_of_each_sequence_alone(name: str, model: Path, ranks: Ranks) -> None:
    # With its second moment switched off by a huge epsilon AdamW is plain gradient descent, here of steps so large that
    # the weights they start from are lost in them.
    plain = {"eps": 1e6, "lr": 1e9, "max_grad_norm": 1e9}
    rows = _token_advantages(_rows(10)) if name == "ppo" else _rows(10)
    packed, alone = (
        engine_of(model, ranks, algorithm={"name": name}, token_budget=budget, **plain) for budget in (4096, 24)
    )
    start = packed.full_parameters()

    losses = [engine.train_step(rows, step=1, total_steps=1).loss for engine in (packed, alone)]

    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    moved = packed.full_parameters()
    for parameter, value in alone.full_parameters().items():
        change = value - start[parameter]
        assert torch.linalg.norm(moved[parameter] - value) <= 1e-5 * torch.linalg.norm(change)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_sequences_of_one_trajectory_are_one_answer(aggregation: str, model: Path, ranks: Ranks) -> None:
    rows = [replace(row, index=number // 2) for number, row in enumerate(random_rows(6))]
    constant = {"aggregation_constant": 50} if aggregation == "constant" else {}
    algorithm = {"name": "rloo", "decoupled": False, "aggregation": aggregation, **constant}
    engine = engine_of(model, ranks, algorithm=algorithm)
    logprobs = engine.logprobs(rows)
    sums = [0.0, 0.0, 0.0]
    counts = [0, 0, 0]
    for row, logprobs_L in zip(rows, logprobs, strict=True):
        sums[row.index] -= float(np.asarray(row.advantage)) * float(logprobs_L.sum())
        counts[row.index] += int(row.loss_mask.sum())

    stats = engine.train_step(rows, step=1, total_steps=1)

    expected = {
        "token_mean": sum(sums) / sum(counts),
        "sequence_mean": sum(one / count for one, count in zip(sums, counts, strict=True)) / 3,
        "sequence_sum": sum(sums) / 3,
        "constant": sum(sums) / 50 / 3,
    }
    assert stats.loss == pytest.approx(expected[aggregation], rel=1e-4)
