"""A reward model's update is that of the papers' loss over whole pairs, however they are packed and over any ranks."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.algorithms.preference import bradley_terry_loss, packed_bradley_terry
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.pairs import Pair, PairEngine
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.engine.test_critic import reward_model as reward_model
from tests.unit.trainer.models import VOCAB, random_rows
from tests.unit.trainer.rank_workers import RankWorkers


def engine_of(model: Path, ranks: Ranks, **trainer: Any) -> PairEngine:
    """Make an engine with a learning rate that shows."""
    return PairEngine(
        model=ModelSettings(path=str(model), dtype="float32"),
        trainer=TrainerSettings.model_validate({"lr": 1e-2, "token_budget": 64, **trainer}),
        ranks=ranks,
    )


def random_pairs(count: int, *, seed: int = 0) -> list[Pair]:
    """Make pairs of 2 to 12 tokens a side with a beginning in common."""
    random = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        return random.integers(2, VOCAB, int(random.integers(least, most))).tolist()

    pairs = []
    for _ in range(count):
        question = tokens(1, 4)
        pairs.append(Pair([*question, *tokens(1, 9)], [*question, *tokens(1, 9)]))
    return pairs


def plain_scores(folder: Path, pairs: Sequence[Pair], *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a classifier by transformers alone, and the scores it gives each answer on its own [P, 2]."""
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=dtype, attn_implementation="eager"
    ).eval()
    scores = [[classifier(torch.tensor([answer])).logits.squeeze() for answer in pair] for pair in pairs]
    return classifier, torch.stack([torch.stack(both) for both in scores])


def test_packed_loss_equals_the_loss_of_pairs_and_leaves_out_what_is_masked() -> None:
    scores = torch.randn(8, dtype=torch.float64, requires_grad=True)

    terms = packed_bradley_terry(scores, torch.ones(8, dtype=torch.bool))
    nothing = packed_bradley_terry(scores[:1], torch.zeros(1, dtype=torch.bool))

    assert terms.loss.item() == pytest.approx(4 * bradley_terry_loss(scores[0::2], scores[1::2]).item(), rel=1e-12)
    assert terms.sums["right"] == sum(scores[0::2] > scores[1::2])
    nothing.loss.backward()
    assert (nothing.loss, nothing.sums["right"]) == (0, 0)
    assert scores.grad is not None, "the row of a rank that has run out goes through the model as well"
    assert not scores.grad.any()


def test_score_is_the_exported_classifier_s_at_the_last_token(reward_model: Path, ranks: Ranks) -> None:
    pairs = random_pairs(7)

    scores = engine_of(reward_model, ranks).scores(pairs)

    assert torch.allclose(scores, plain_scores(reward_model, pairs)[1], atol=1e-5)
    assert len(set(scores.flatten().tolist())) > 7


def test_loss_and_gradient_norm_equal_a_float64_computation(reward_model: Path, ranks: Ranks) -> None:
    pairs = random_pairs(7)
    classifier, scores = plain_scores(reward_model, pairs, dtype=torch.float64)
    loss = bradley_terry_loss(*scores.unbind(1))
    loss.backward()
    grad_norm = torch.stack([one.grad.norm() for one in classifier.parameters() if one.grad is not None]).norm()

    stats = engine_of(reward_model, ranks).train_step(pairs, step=1, total_steps=1)

    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert stats.grad_norm == pytest.approx(grad_norm.item(), rel=1e-4)
    assert stats.accuracy == pytest.approx((scores[:, 0] > scores[:, 1]).double().mean().item())
    assert stats.margin_mean == pytest.approx((scores[:, 0] - scores[:, 1]).mean().item(), abs=1e-5)
    assert stats.num_pairs == 7


def test_a_step_is_the_same_however_pairs_are_packed(reward_model: Path, ranks: Ranks) -> None:
    pairs = random_pairs(9)
    together = engine_of(reward_model, ranks, token_budget=4096)
    alone = engine_of(reward_model, ranks, token_budget=max(pair.num_tokens for pair in pairs))

    stats = asdict(together.train_step(pairs, step=1, total_steps=1))
    stats_alone = asdict(alone.train_step(pairs[::-1], step=1, total_steps=1))

    assert stats == pytest.approx(stats_alone, rel=1e-4, abs=1e-6)
    assert torch.allclose(together.scores(pairs), alone.scores(pairs), atol=1e-3)


def test_a_new_reward_model_comes_to_tell_pairs_apart(model: Path, ranks: Ranks) -> None:
    engine, pairs = engine_of(model, ranks), random_pairs(6)

    stats = [engine.train_step(pairs, step=step, total_steps=20) for step in range(1, 21)]

    assert stats[0].loss == pytest.approx(math.log(2)), "a new head says 0 of everything"
    assert stats[-1].accuracy == 1.0
    assert stats[-1].loss < 0.2


def test_exported_folder_is_a_plain_classifier_and_starts_a_critic_as_it_is(
    model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    from transformers import AutoModelForSequenceClassification

    engine, pairs = engine_of(model, ranks), random_pairs(4)
    engine.train_step(pairs, step=1, total_steps=1)
    engine.save_weights(tmp_path / "model")

    _, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert torch.allclose(engine.scores(pairs), plain_scores(tmp_path / "model", pairs)[1], atol=1e-5)
    settings = Settings(model=ModelSettings(path=str(tmp_path / "model"), dtype="float32"))
    critic = CriticEngine(settings, ranks)
    assert any(values.any() for values in critic.values(random_rows(3)))


@pytest.mark.timeout(300)
def test_two_ranks_make_the_updates_of_one(reward_model: Path, ranks: Ranks, two_ranks: RankWorkers) -> None:
    pairs = random_pairs(7)
    engine = engine_of(reward_model, ranks)
    expected = [asdict(engine.train_step(pairs, step=step, total_steps=2)) for step in (1, 2)]
    norms = fingerprint(engine)

    first, second = two_ranks.run(train_together, reward_model)

    for seen in (first, second):
        for mine, other in zip(seen["stats"], expected, strict=True):
            assert mine | {"num_tokens": 0} == pytest.approx(other | {"num_tokens": 0}, rel=1e-3, abs=1e-5)
    assert first["fingerprint"] == pytest.approx(norms, rel=1e-3, abs=1e-6)
    for layout, stats in first["layouts"].items():
        assert stats == pytest.approx(expected[0], rel=1e-3, abs=1e-5), layout


def fingerprint(engine: PairEngine) -> dict[str, float]:
    """Return numbers that tell the parameters."""
    return {name: float(one.double().norm()) for name, one in engine.full_parameters().items()}


def train_together(ranks: Ranks, model: Path) -> dict[str, Any]:
    """Train beside another rank: first both with pairs, then all pairs on one; and as parts of one model."""
    engine, pairs, is_first = engine_of(model, ranks), random_pairs(7), ranks.rank == 0
    mine = [pairs[:5] if is_first else pairs[5:], [] if is_first else pairs]
    stats = [asdict(engine.train_step(part, step=step, total_steps=2)) for step, part in enumerate(mine, start=1)]
    layouts = {}
    for layout in ("pipeline_parallel", "tensor_parallel"):
        divided = engine_of(model, ranks, num_ranks=2, **{layout: 2})
        layouts[layout] = asdict(divided.train_step(pairs, step=1, total_steps=2))
    return {"stats": stats, "fingerprint": fingerprint(engine), "layouts": layouts}
