"""The critic learns what it is told, by the papers' loss over every trained token, however rows are packed."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import RETURNS, VALUES, TrainRow, with_columns
from tests.unit.trainer.models import engine_of, random_rows, save_model


def critic_of(
    model: Path, ranks: Ranks, *, value_clip: float | None = 0.2, num_minibatches: int = 1, **trainer: Any
) -> CriticEngine:
    """Make a critic with a learning rate that shows."""
    settings = Settings(
        model=ModelSettings(path=str(model), dtype="float32"),
        trainer=TrainerSettings.model_validate({"lr": 1e-2, "token_budget": 64, "num_ranks": ranks.size, **trainer}),
        algorithm=AlgorithmSettings(name="ppo", value_clip=value_clip, num_minibatches=num_minibatches),
    )
    return CriticEngine(settings, ranks)


def with_targets(engine: CriticEngine, rows: Sequence[TrainRow], *, seed: int = 0) -> list[TrainRow]:
    random = np.random.default_rng(seed)
    returns = [random.normal(size=row.num_tokens).astype(np.float32) for row in rows]
    return with_columns(rows, {VALUES: engine.values(rows), RETURNS: returns})


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a classifier of one label."""
    from transformers import AutoModelForSequenceClassification

    folder = save_model(tmp_path_factory.mktemp("reward"))
    torch.manual_seed(3)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    classifier.save_pretrained(folder)
    return folder


def plain_values(folder: Path, row: TrainRow) -> torch.Tensor:
    """Return values [L] by transformers alone: of the position before each token; 0 for the first."""
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    hidden = classifier.base_model(torch.from_numpy(row.token_ids).long()[None]).last_hidden_state[0]
    values_L: torch.Tensor = torch.nn.functional.pad(classifier.score(hidden)[:-1, 0], (1, 0))
    return values_L


def test_a_new_critic_expects_nothing(model: Path, ranks: Ranks) -> None:
    values = critic_of(model, ranks).values(random_rows(4))

    assert [len(one) for one in values] == [row.num_tokens for row in random_rows(4)]
    assert not any(one.any() for one in values)


def test_a_value_is_of_what_stands_before_its_token(reward_model: Path, ranks: Ranks) -> None:
    rows = random_rows(6)

    packed = critic_of(reward_model, ranks).values(rows)

    for row, values in zip(rows, packed, strict=True):
        expected = plain_values(reward_model, row) * torch.from_numpy(row.loss_mask)
        assert values.any()
        assert torch.allclose(values, expected, atol=1e-5)


def test_loss_and_gradient_norm_equal_a_plain_computation(reward_model: Path, ranks: Ranks) -> None:
    from transformers import AutoModelForSequenceClassification

    engine = critic_of(reward_model, ranks)
    rows = with_targets(engine, random_rows(5))
    # As if an earlier update of the step had moved the critic, so that some values are clipped.
    rows = [replace(row, columns={**row.columns, VALUES: row.columns[VALUES] + 0.3}) for row in rows]
    classifier = AutoModelForSequenceClassification.from_pretrained(
        reward_model, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    loss, num_tokens, num_clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for row in rows:
        hidden = classifier.base_model(torch.from_numpy(row.token_ids).long()[None]).last_hidden_state[0]
        values = classifier.score(hidden)[:, 0]
        for t in np.flatnonzero(row.loss_mask):
            value, old, target = values[t - 1].double(), float(row.columns[VALUES][t]), float(row.columns[RETURNS][t])
            clipped = min(max(value, old - 0.2), old + 0.2)
            loss = loss + 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
            num_clipped += bool((clipped - target) ** 2 > (value - target) ** 2)
            num_tokens += 1
    (loss / num_tokens).backward()
    gradients = [p.grad for p in classifier.parameters() if p.grad is not None]
    grad_norm = torch.stack([one.norm() for one in gradients]).norm()

    stats = engine.train_step(rows, step=1, total_steps=1)

    assert 0 < num_clipped < num_tokens
    assert stats.value_loss == pytest.approx(loss.item() / num_tokens, rel=1e-5)
    assert stats.value_grad_norm == pytest.approx(grad_norm.item(), rel=1e-4)
    assert stats.value_clip_fraction == pytest.approx(num_clipped / num_tokens)


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_a_step_is_the_same_however_rows_are_packed(num_minibatches: int, reward_model: Path, ranks: Ranks) -> None:
    packed = critic_of(reward_model, ranks, num_minibatches=num_minibatches, token_budget=4096)
    alone = critic_of(reward_model, ranks, num_minibatches=num_minibatches, token_budget=24)
    rows = with_targets(packed, random_rows(12))

    stats = packed.train_step(rows, step=1, total_steps=1)
    stats_alone = alone.train_step(rows[::-1], step=1, total_steps=1)

    assert asdict(stats) == pytest.approx(asdict(stats_alone), rel=1e-4, abs=1e-6)
    for mine, other in zip(packed.values(rows), alone.values(rows), strict=True):
        assert torch.allclose(mine, other, atol=1e-3)


def test_a_critic_comes_to_expect_its_returns(model: Path, ranks: Ranks) -> None:
    engine = critic_of(model, ranks, value_clip=None)
    rows = with_columns(
        random_rows(6), {RETURNS: [np.full(row.num_tokens, 0.5 + row.index % 2) for row in random_rows(6)]}
    )

    losses = [
        engine.train_step(with_columns(rows, {VALUES: engine.values(rows)}), step=step, total_steps=30).value_loss
        for step in range(1, 31)
    ]

    assert losses[0] > 0.3
    assert losses[-1] < 0.1 * losses[0]


def test_a_checkpoint_holds_the_critic_and_its_optimizer(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    actor, critic, resumed = engine_of(model, ranks), critic_of(model, ranks), critic_of(model, ranks)
    rows = with_targets(critic, random_rows(6))
    for step in (1, 2):
        critic.train_step(rows, step=step, total_steps=4)
    Engines(actor=actor, critic=critic).save_checkpoint(tmp_path / "1-2", b"ledger")

    assert Engines(actor=actor, critic=resumed).load_checkpoint(tmp_path / "1-2") == b"ledger"

    for step in (3, 4):
        assert resumed.train_step(rows, step=step, total_steps=4) == critic.train_step(rows, step=step, total_steps=4)
    for mine, other in zip(critic.values(rows), resumed.values(rows), strict=True):
        assert torch.equal(mine, other)


def test_a_checkpoint_without_a_critic_does_not_start_one(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    actor, critic = engine_of(model, ranks), critic_of(model, ranks)
    Engines(actor=actor).save_checkpoint(tmp_path / "1-1", b"")

    with pytest.raises(UserError, match="has no critic; go on with the algorithm it was made with"):
        Engines(actor=actor, critic=critic).load_checkpoint(tmp_path / "1-1")


def test_a_classifier_of_several_labels_is_no_critic(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = save_model(tmp_path / "judge")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(folder)

    with pytest.raises(UserError, match="as a decoder with a head of one output"):
        critic_of(folder, ranks)
