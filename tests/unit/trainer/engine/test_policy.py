"""A step is the gradient of the papers' loss over every trained token, however the rows are laid out."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from areal_async.algorithms.objective import LossTerms, ScoredTokens
from areal_async.algorithms.presets import policy_objective
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import PackedRow, TrainRow, pack_rows
from tests.unit.trainer.models import FAMILIES, VOCAB, engine_of, parameters_differ, random_rows, save_model, tempered


def reference_logprobs(model: Path, row: TrainRow, temperature: float = 1.0) -> torch.Tensor:
    """Return logprobs [L] by transformers alone, one sequence at a time; 0 for the first token."""
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(row.token_ids).long()
    log_probs = F.log_softmax(causal_lm(ids[None]).logits[0] / temperature, dim=-1)
    return F.pad(log_probs[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_equal_those_of_each_sequence_alone(family: str, ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / family, family=family, tied=family != "llama")
    rows = random_rows(6)

    packed = engine_of(model, ranks).logprobs(rows)

    for row, logprobs in zip(rows, packed, strict=True):
        expected = reference_logprobs(model, row) * torch.from_numpy(row.loss_mask)
        assert torch.allclose(logprobs, expected, atol=1e-5)


def test_logprobs_are_of_the_tempered_distribution(model: Path, ranks: Ranks) -> None:
    row = replace(random_rows(1)[0], temperature=0.7)

    (logprobs,) = engine_of(model, ranks).logprobs([row])

    expected = reference_logprobs(model, row, temperature=0.7) * torch.from_numpy(row.loss_mask)
    assert torch.allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1000, 3])
def test_every_token_has_the_logprob_of_its_own_temperature(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """Rows of one temperature beside rows of several, packed together, with the head in chunks or not."""
    monkeypatch.setattr("areal_async.trainer.engine.model.HEAD_CHUNK_ELEMENTS", chunk_tokens * VOCAB)
    rows = tempered(random_rows(6))

    answers = engine_of(model, ranks).logprobs(rows)

    for row, logprobs in zip(rows, answers, strict=True):
        each = torch.as_tensor(np.broadcast_to(row.temperature, row.num_tokens).copy())
        each = torch.where(each == 0, 1.0, each)
        by_temperature = {
            float(one): reference_logprobs(model, row, temperature=float(one)) for one in set(each.tolist())
        }
        expected = torch.stack([by_temperature[float(one)][place] for place, one in enumerate(each)])
        assert torch.allclose(logprobs, expected * torch.from_numpy(row.loss_mask), atol=1e-5)


def test_one_temperature_for_each_token_trains_as_one_number_for_all(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: whether tokens are packed with others of their temperature changes nothing that is learned."""
    rows = [replace(row, temperature=0.7) for row in random_rows(6)]
    one, each = engine_of(model, ranks), engine_of(model, ranks)
    of_one = asdict(one.train_step(rows, step=1, total_steps=1))

    def as_tensor(*arguments: Any) -> PackedRow:
        packed = pack_rows(*arguments)
        return replace(packed, temperature=torch.full_like(packed.behave_S, 0.7))

    monkeypatch.setattr("areal_async.trainer.engine.parallel.division.pack_rows", as_tensor)

    assert asdict(each.train_step(rows, step=1, total_steps=1)) == of_one
    assert parameters_differ(one, each) == 0


def test_logprobs_of_a_row_without_trained_tokens_are_zeros(model: Path, ranks: Ranks) -> None:
    rows = random_rows(3)
    rows[1] = replace(rows[1], loss_mask=np.zeros(rows[1].num_tokens, dtype=np.bool_))

    results = engine_of(model, ranks).logprobs(rows)

    assert [bool(result.any()) for result in results] == [True, False, True]


def test_loss_and_gradient_norm_equal_a_plain_computation(model: Path, ranks: Ranks) -> None:
    from transformers import AutoModelForCausalLM

    rows = random_rows(5)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        ids, mask = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)
        log_probs = F.log_softmax(causal_lm(ids[None]).logits[0], dim=-1)
        logprobs = F.pad(log_probs[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))[mask]
        weight = (logprobs.detach() - torch.from_numpy(row.behave_logprobs)[mask]).exp().clamp(max=5.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (weight * ratio * row.advantage).sum() / num_tokens
    loss.backward()
    grads = {name: p.grad for name, p in causal_lm.named_parameters() if p.grad is not None}

    def norm_of(*marks: str) -> float:
        return float(torch.stack([g.norm() for name, g in grads.items() if any(one in name for one in marks)]).norm())

    stats = engine_of(model, ranks).train_step(rows, step=1, total_steps=1)

    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    assert stats.grad_norm == pytest.approx(norm_of(""), rel=1e-4)
    assert stats.grad_norm_embeddings == pytest.approx(norm_of("embed_tokens"), rel=1e-4)
    assert stats.grad_norm_attention == pytest.approx(norm_of("q_proj", "k_proj", "v_proj", "o_proj"), rel=1e-4)
    assert stats.grad_norm_mlp == pytest.approx(norm_of("gate_proj", "up_proj", "down_proj"), rel=1e-4)
    assert stats.grad_norm_norms == pytest.approx(norm_of("norm"), rel=1e-4)
    assert stats.grad_norm_layers_first == pytest.approx(norm_of("layers.0."), rel=1e-4)
    assert stats.grad_norm_layers_middle == pytest.approx(norm_of("layers.1."), rel=1e-4)
    # Two layers leave no last third; the head is the embeddings.
    assert stats.grad_norm_layers_last == stats.grad_norm_head == stats.grad_norm_other == 0
    assert stats.num_tokens == num_tokens


@pytest.mark.parametrize("algorithm", [{}, {"num_minibatches": 3}, {"decoupled": False, "entropy_coef": 0.1}])
def test_a_step_is_the_same_however_rows_are_packed(algorithm: dict[str, object], model: Path, ranks: Ranks) -> None:
    rows = random_rows(12)
    packed = engine_of(model, ranks, algorithm=algorithm, token_budget=4096)
    alone = engine_of(model, ranks, algorithm=algorithm, token_budget=24)

    stats = packed.train_step(rows, step=1, total_steps=1)
    stats_alone = alone.train_step(rows[::-1], step=1, total_steps=1)

    assert asdict(stats) == pytest.approx(asdict(stats_alone), rel=1e-4, abs=1e-5)
    assert stats.num_updates == algorithm.get("num_minibatches", 1)
    # AdamW divides each gradient by its own size, which makes rounding visible at the scale of the learning rate.
    assert parameters_differ(packed, alone) < 1e-2 * 1e-2 * stats.num_updates


def test_the_gradient_of_packed_rows_is_that_of_each_sequence_alone(model: Path, ranks: Ranks) -> None:
    # With its second moment switched off by a huge epsilon AdamW is plain gradient descent, here of steps so large that
    # the weights they start from are lost in them.
    plain = {"eps": 1e6, "lr": 1e9, "max_grad_norm": 1e9}
    packed, alone = (engine_of(model, ranks, token_budget=budget, **plain) for budget in (4096, 24))
    start = packed.full_parameters()

    for engine in (packed, alone):
        engine.train_step(random_rows(12), step=1, total_steps=1)

    moved = packed.full_parameters()
    for name, value in alone.full_parameters().items():
        change = value - start[name]
        assert torch.linalg.norm(moved[name] - value) <= 1e-5 * torch.linalg.norm(change)


def test_recomputed_activations_and_chunked_logits_change_nothing(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(6)
    whole = engine_of(model, ranks).train_step(rows, step=1, total_steps=1)
    monkeypatch.setattr("areal_async.trainer.engine.model.HEAD_CHUNK_ELEMENTS", 3 * VOCAB)

    chunked = engine_of(model, ranks, activation_checkpointing=True).train_step(rows, step=1, total_steps=1)

    assert chunked.loss == pytest.approx(whole.loss, abs=1e-6)
    assert chunked.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert chunked.entropy_mean == pytest.approx(whole.entropy_mean, rel=1e-6)


def test_no_more_logits_than_a_chunk_are_made_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from areal_async.trainer.engine.attention import PACKED, register_packed_attention

    register_packed_attention()
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=PACKED)
    made: list[int] = []
    monkeypatch.setattr("areal_async.trainer.engine.model.HEAD_CHUNK_ELEMENTS", 3 * VOCAB)
    causal_lm.lm_head.register_forward_hook(lambda module, inputs, output: made.append(output.shape[0]))

    PolicyModel(causal_lm)(pack_rows(random_rows(4), torch.device("cpu")))

    assert max(made) == 3


def test_gradients_are_clipped_to_the_norm_and_reported_before(model: Path, ranks: Ranks) -> None:
    rows = random_rows(6)
    # With its second moment switched off by a huge epsilon AdamW is plain gradient descent.
    free = engine_of(model, ranks, max_grad_norm=1e9, eps=1e6, lr=1e5)
    clipped = engine_of(model, ranks, max_grad_norm=0.01, eps=1e6, lr=1e5)
    start = free.full_parameters()

    norm = free.train_step(rows, step=1, total_steps=1).grad_norm

    assert clipped.train_step(rows, step=1, total_steps=1).grad_norm == pytest.approx(norm)
    moved = free.full_parameters()
    for name, value in clipped.full_parameters().items():
        expected = start[name] + (moved[name] - start[name]) * 0.01 / norm
        assert torch.allclose(value, expected, atol=1e-5)


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(model: Path, ranks: Ranks) -> None:
    engine, untouched = engine_of(model, ranks), engine_of(model, ranks)
    rows = random_rows(4)

    stats = engine.train_step([*rows[:3], replace(rows[3], advantage=math.nan)], step=1, total_steps=2)

    assert (stats.num_updates, stats.num_skipped, stats.num_skipped_loss) == (0, 1, 1)
    assert parameters_differ(engine, untouched) == 0
    assert engine.train_step(rows, step=2, total_steps=2).num_updates == 1


def test_a_loss_that_is_not_finite_skips_its_update_though_its_gradient_is(model: Path, ranks: Ranks) -> None:
    untouched = engine_of(model, ranks)
    objective = policy_objective(Settings())

    def endless(tokens: ScoredTokens) -> LossTerms:
        terms = objective(tokens)
        return replace(terms, loss=terms.loss + math.inf)

    engine = FsdpEngine(
        model=ModelSettings(path=str(model), dtype="float32"), trainer=TrainerSettings(token_budget=64), ranks=ranks,
        objective=endless,
    )  # fmt: skip

    stats = engine.train_step(random_rows(4), step=1, total_steps=1)

    assert (stats.num_updates, stats.num_skipped, stats.num_skipped_loss) == (0, 1, 1)
    assert parameters_differ(engine, untouched) == 0


def test_a_skipped_update_spoils_no_number_of_the_others(model: Path, ranks: Ranks) -> None:
    rows = random_rows(8)
    bad = [replace(row, advantage=math.nan) if row.index % 2 else row for row in rows]
    half, whole = (engine_of(model, ranks, algorithm={"num_minibatches": number}) for number in (2, 1))

    stats = half.train_step(bad, step=1, total_steps=1)
    alone = whole.train_step(rows[::2], step=1, total_steps=1)

    assert (stats.num_updates, stats.num_skipped) == (1, 1)
    expected = asdict(alone) | {"num_skipped": 1, "num_skipped_loss": 1}
    assert asdict(stats) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_gaps_have_a_histogram_and_a_divergence(model: Path, ranks: Ranks) -> None:
    engine = engine_of(model, ranks)
    rows = random_rows(8)
    shifts = (0.0, 0.005, 0.05, 0.5, 2.0)
    shifted = [
        replace(row, behave_logprobs=logprobs.numpy() + shifts[row.index % 5], current_mask=row.loss_mask)
        for row, logprobs in zip(rows, engine.logprobs(rows), strict=True)
    ]
    counts = [sum(int(row.loss_mask.sum()) for row in rows if row.index % 5 == number) for number in range(5)]

    stats = engine.train_step(shifted, step=1, total_steps=1)

    over = [
        stats.logprob_gap_over_0_001, stats.logprob_gap_over_0_01, stats.logprob_gap_over_0_1, stats.logprob_gap_over_1,
    ]  # fmt: skip
    assert over == pytest.approx([sum(counts[number:]) / sum(counts) for number in range(1, 5)])
    divergences = [math.exp(-shift) - 1 + shift for shift in shifts]
    mean = sum(one * count for one, count in zip(divergences, counts, strict=True)) / sum(counts)
    assert stats.behave_kl_mean == pytest.approx(mean, rel=1e-4, abs=1e-6)


def test_clips_are_told_by_their_side(model: Path, ranks: Ranks) -> None:
    engine = engine_of(model, ranks, algorithm={"decoupled": False})
    rows = random_rows(9)
    # Ratios of e^-1, 1 and e against the server, each with an advantage that the clip takes the gradient of.
    shifted = [
        replace(row, behave_logprobs=logprobs.numpy() + (row.index % 3 - 1), advantage=float(1 - row.index % 3) or 1.0)
        for row, logprobs in zip(rows, engine.logprobs(rows), strict=True)
    ]
    counts = [sum(int(row.loss_mask.sum()) for row in rows if row.index % 3 == number) for number in range(3)]

    stats = engine.train_step(shifted, step=1, total_steps=1)

    assert stats.clip_fraction_upper == pytest.approx(counts[0] / sum(counts))
    assert stats.clip_fraction_lower == pytest.approx(counts[2] / sum(counts))
    assert stats.clip_fraction == pytest.approx((counts[0] + counts[2]) / sum(counts))


def test_a_step_without_a_trained_token_changes_nothing(model: Path, ranks: Ranks) -> None:
    engine, untouched = engine_of(model, ranks), engine_of(model, ranks)
    masked = [replace(row, loss_mask=np.zeros(row.num_tokens, dtype=np.bool_)) for row in random_rows(3)]

    stats = engine.train_step(masked, step=1, total_steps=1)

    assert (stats.num_tokens, stats.num_updates, stats.num_skipped, stats.loss) == (0, 0, 0, 0.0)
    assert parameters_differ(engine, untouched) == 0


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_gap_is_taken_by_the_weights_of_the_steps_start(num_minibatches: int, model: Path, ranks: Ranks) -> None:
    engine = engine_of(model, ranks, algorithm={"num_minibatches": num_minibatches})
    rows = random_rows(8)
    honest = [replace(r, behave_logprobs=lp.numpy()) for r, lp in zip(rows, engine.logprobs(rows), strict=True)]
    shifted = [
        replace(r, behave_logprobs=np.where(r.current_mask, r.behave_logprobs + 0.1, r.behave_logprobs - 0.5))
        for r in honest
    ]

    exact = engine.train_step(honest, step=1, total_steps=2)

    assert exact.logprob_gap_max < 1e-5
    assert exact.ratio_max_deviation < 1e-5
    engine = engine_of(model, ranks, algorithm={"num_minibatches": num_minibatches})
    stats = engine.train_step(shifted, step=1, total_steps=2)
    assert stats.logprob_gap_mean == pytest.approx(0.1, abs=1e-5)
    assert stats.ratio_max_deviation == pytest.approx(1 - math.exp(-0.1), abs=1e-5)
    assert 0.1 < stats.logprob_gap_all_mean < 0.5
    assert stats.num_current_tokens == sum(int((r.current_mask & r.loss_mask).sum()) for r in rows)


def test_at_staleness_zero_the_ratio_is_taken_against_the_server(model: Path, ranks: Ranks) -> None:
    rows = random_rows(4)
    engine = engine_of(model, ranks, max_staleness=0)
    start = engine.logprobs(rows)
    behave = [replace(r, behave_logprobs=lp.numpy() - 0.25) for r, lp in zip(rows, start, strict=True)]

    stats = engine.train_step(behave, step=1, total_steps=1)

    assert stats.ratio_mean == pytest.approx(math.exp(0.25), rel=1e-5)
    assert stats.behave_weight_mean == 1.0


def test_in_bfloat16_parameters_and_gradients_stay_float32(model: Path, ranks: Ranks) -> None:
    rows = random_rows(6)
    exact = engine_of(model, ranks)
    engine = engine_of(model, ranks, dtype="bfloat16")

    stats, exact_stats = (one.train_step(rows, step=1, total_steps=1) for one in (engine, exact))

    assert stats.grad_norm == pytest.approx(exact_stats.grad_norm, rel=0.05)
    assert stats.grad_norm != exact_stats.grad_norm
    parameters = engine.full_parameters().values()
    assert all((value != value.bfloat16()).any() for value in parameters)


def test_a_model_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(UserError, match=r"model: got .*/nowhere, which is no folder; set model.path"):
        engine_of(tmp_path / "nowhere", ranks)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, "whose weights are stored in another layout"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "with final_logit_softcapping=30.0, need a head without scaling"),
    ],
)
def test_a_model_that_would_be_trained_or_written_wrongly_is_refused(
    family: str, given: dict[str, object], message: str, ranks: Ranks, tmp_path: Path
) -> None:
    model = save_model(tmp_path / family, family=family, **given)

    with pytest.raises(UserError, match=message):
        engine_of(model, ranks)


def test_a_folder_that_holds_no_causal_language_model_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')

    with pytest.raises(UserError, match="cannot load"):
        engine_of(tmp_path, ranks)
