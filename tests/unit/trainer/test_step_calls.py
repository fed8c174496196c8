"""A step's calls give the policy and the critic what the graph says, on one rank and on two."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_async.algorithms.kl import ESTIMATORS
from areal_async.config.live import settings_of_step, step_numbers
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import REFERENCE, with_columns
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.trained_steps import NUM_STEPS, TrainedSteps, batch_rows, train_together

PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "num_minibatches": 2}


@pytest.mark.timeout(300)
def test_two_ranks_train_actor_and_critic_as_one_does(
    model: Path, ranks: Ranks, two_ranks: RankWorkers, tmp_path: Path
) -> None:
    alone = TrainedSteps(model, ranks, **PPO)
    stats = [alone.train(batch_rows(), step=step) for step in range(1, NUM_STEPS + 1)]

    first, second = two_ranks.run(train_together, model, PPO, tmp_path)

    assert first["stats"] == second["stats"]
    for together, one in zip(first["stats"], stats, strict=True):
        assert together == pytest.approx(one, rel=1e-3, abs=1e-5)
    assert first["fingerprint"] == pytest.approx(alone.fingerprint(), rel=1e-5, abs=1e-6)
    assert stats[1]["kl_mean"] > 0  # the policy has left the reference, so every call had something to say
    assert stats[1]["explained_variance"] != 0
    resumed = TrainedSteps(model, ranks, **PPO)
    assert resumed.engines.load_checkpoint(tmp_path / "checkpoint") == b"ledger"
    assert resumed.fingerprint() == pytest.approx(first["fingerprint"], rel=1e-6)


def test_a_resumed_step_equals_one_that_was_never_interrupted(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    through, resumed = TrainedSteps(model, ranks, **PPO), TrainedSteps(model, ranks, **PPO)
    through.train(batch_rows(), step=1)
    through.engines.save_checkpoint(tmp_path / "1-1", b"ledger")

    resumed.engines.load_checkpoint(tmp_path / "1-1")

    for step in (2, 3):
        assert resumed.train(batch_rows(), step=step) == through.train(batch_rows(), step=step)
    assert resumed.fingerprint() == through.fingerprint()


def test_a_step_is_trained_with_the_numbers_of_its_cut_though_the_engines_were_made_with_others(
    model: Path, ranks: Ranks
) -> None:
    """The critic's rate, the distance to the reference, the clip range: from one step to the next."""
    wanted = {**PPO, "kl_coef": 0.4, "eps_clip": 1e-3, "entropy_coef": 0.2}
    changed, made_so = TrainedSteps(model, ranks, **PPO), TrainedSteps(model, ranks, **wanted)
    numbers = step_numbers(made_so.settings)
    changed.settings = settings_of_step(changed.settings, lr=1e-3, numbers=numbers)

    for step in (1, 2):
        assert changed.train(batch_rows(), step=step) == made_so.train(batch_rows(), step=step)
    changed.settings = settings_of_step(changed.settings, lr=1e-3, numbers=numbers | {"trainer.critic.lr": 1e-4})
    stats = changed.train(batch_rows(), step=3)

    assert (stats["lr"], stats["value_lr"]) == (1e-3, 1e-4)
    assert stats != TrainedSteps(model, ranks, **PPO).train(batch_rows(), step=3)


def test_a_call_of_the_users_own_changes_what_the_policy_is_told(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "muted.py"
    file.write_text("def advantages(rows, advantages):\n    return [0.0 * one for one in advantages]\n")

    stats = TrainedSteps(model, ranks, calls=[f"{file}:advantages"]).train(batch_rows(), step=1)

    assert stats["grad_norm"] == 0
    assert TrainedSteps(model, ranks).train(batch_rows(), step=1)["grad_norm"] > 0


def test_the_critic_learns_while_the_policy_does(model: Path, ranks: Ranks) -> None:
    runner = TrainedSteps(model, ranks, name="ppo")
    before = runner.fingerprint()

    stats = runner.train(batch_rows(), step=1)

    after = runner.fingerprint()
    assert before["critic.score.weight"] == 0 < after["critic.score.weight"]
    assert all(before[name] != after[name] for name in before if name.endswith("proj.weight") and "critic" not in name)
    assert stats["value_mean"] == 0
    assert stats["value_loss"] == pytest.approx(0.5 * stats_square(), rel=1e-5)


def stats_square() -> float:
    """Return the mean square of the returns that an untrained critic has: GAE's sums of rewards alone."""
    squares, count = 0.0, 0
    for row in batch_rows():
        num_tokens = int(row.loss_mask.sum())
        squares += sum((float(np.asarray(row.advantage)) * 0.95**left) ** 2 for left in range(num_tokens))
        count += num_tokens
    return squares / count


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_a_penalty_in_the_loss_equals_that_of_float64(
    estimator: str, model: Path, ranks: Ranks
) -> None:
    from transformers import AutoModelForCausalLM

    rows = [replace(row, advantage=0.0) for row in random_rows(5)]
    reference = [torch.from_numpy(row.behave_logprobs) for row in rows]
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    loss, num_tokens = torch.zeros((), dtype=torch.float64), sum(int(row.loss_mask.sum()) for row in rows)
    for row, other in zip(rows, reference, strict=True):
        ids, mask = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)
        log_probs = torch.log_softmax(causal_lm(ids[None]).logits[0], dim=-1)
        logprobs = torch.nn.functional.pad(log_probs[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
        loss = loss + 0.1 * ESTIMATORS[estimator]((logprobs - other.double())[mask]).sum() / num_tokens
    loss.backward()
    grad_norm = torch.stack([p.grad.norm() for p in causal_lm.parameters() if p.grad is not None]).norm()
    engine = engine_of(model, ranks, algorithm={"kl_coef": 0.1, "kl_estimator": estimator})

    stats = engine.train_step(with_columns(rows, {REFERENCE: reference}), step=1, total_steps=1, columns=[REFERENCE])

    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert stats.grad_norm == pytest.approx(grad_norm.item(), rel=1e-4)
    assert stats.kl_mean == pytest.approx(loss.item() / 0.1, rel=1e-5)


def test_at_the_start_the_reference_says_what_the_policy_says(model: Path, ranks: Ranks) -> None:
    runner = TrainedSteps(model, ranks, kl_coef=0.1)
    assert runner.engines.reference is not None

    first = runner.train(batch_rows(), step=1)
    second = runner.train(batch_rows(), step=2)

    assert first["kl_mean"] == 0
    assert second["kl_mean"] > 0


def test_a_missing_reference_is_an_error(model: Path, ranks: Ranks) -> None:
    engine = engine_of(model, ranks, algorithm={"kl_coef": 0.1})

    with pytest.raises(ValueError, match="got no reference logprobs"):
        engine.train_step(random_rows(2), step=1, total_steps=1)
