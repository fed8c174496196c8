"""Continuous batching changes when tokens are made, never which: all have the probability of a plain forward pass."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.compute.bands import Band
from areal_async.inference.embedded.engine.compute.layers import PlainModel
from areal_async.inference.embedded.engine.grammar import Grammars
from areal_async.inference.embedded.engine.images import PromptImages
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.protocol import SamplingParams
from areal_async.inference.embedded.engine.runner import ModelRunner, load_runner
from areal_async.inference.embedded.engine.scheduler import PauseMode, Scheduler
from areal_async.inference.embedded.engine.sequence import RunningSequence
from areal_async.inference.embedded.engine.text import load_tokenizer
from areal_async.inference.embedded.engine.weights import stage_weights
from tests.unit.inference.embedded_engine import (
    CONTEXT_LENGTH,
    EOS_ID,
    VOCAB_SIZE,
    prompt_of,
    reference_distribution,
    reference_logprobs,
)

TOLERANCE = 1e-5
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.1,
}


@pytest.fixture
def old_model(models: list[Path]) -> Path:
    return models[0]


@pytest.fixture
def new_model(models: list[Path]) -> Path:
    return models[1]


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(model: Path, **options: Any) -> ModelRunner:
    return load_runner(EngineOptions(model_path=str(model), num_threads=1, device="cpu", **options), model)


def scheduler_of(runner: ModelRunner, *, max_running: int = 16, max_prefill_tokens: int = 64) -> Scheduler:
    options = EngineOptions(
        model_path="",
        weight_version="0-0",
        max_running_requests=max_running,
        max_prefill_tokens=max_prefill_tokens,
    )
    return Scheduler(runner, options)


@pytest.fixture
def scheduler(old_model: Path) -> Scheduler:
    return scheduler_of(load(old_model))


def sequence_of(
    prompt: list[int], num_tokens: int, *, seed: int = 0, images: PromptImages | None = None, **sampling: Any
) -> RunningSequence:
    return RunningSequence(
        rid=f"rid-{seed}-{len(prompt)}",
        prompt_ids=tuple(prompt),
        images=images,
        params=SamplingParams(**sampling),
        max_new_tokens=num_tokens,
        stop_token_ids=frozenset(),
        stop_strings=None,
        seed=seed,
        stream_interval=1,
        emit=lambda sequence, piece: None,
    )


def run(scheduler: Scheduler, steps: int | None = None) -> None:
    while scheduler.has_work and steps != 0:
        scheduler.step()
        steps = None if steps is None else steps - 1


def assert_scored_by(model: Path, sequence: RunningSequence, *, start: int = 0, end: int | None = None) -> None:
    expected = reference_logprobs(model, sequence.prompt_ids, sequence.output_ids, temperature=sequence.params.divisor)
    torch.testing.assert_close(
        torch.tensor(sequence.logprobs[start:end]), torch.tensor(expected[start:end]), atol=TOLERANCE, rtol=0
    )


def test_logprobs_equal_the_forward_pass_however_sequences_join_and_leave(
    scheduler: Scheduler, old_model: Path
) -> None:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}]
    sequences = [sequence_of(prompt_of(3 + 7 * i, seed=i), 5 + 11 * (i % 4), seed=i, **kinds[i % 4]) for i in range(12)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run(scheduler, steps=2)
    run(scheduler)

    for sequence in sequences:
        assert len(sequence.output_ids) == sequence.max_new_tokens
        assert_scored_by(old_model, sequence)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(tie_word_embeddings=False, **TINY), id="llama"),
        pytest.param(LlamaConfig(attention_bias=True, mlp_bias=True, **TINY), id="biases"),
        pytest.param(
            LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **TINY), id="other-frequencies"
        ),
        pytest.param(
            LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, **TINY),
            id="scaled-frequencies",
        ),
        pytest.param(Qwen3Config(head_dim=32, attention_bias=True, **TINY), id="qwen3"),
        pytest.param(Qwen2Config(**TINY), id="qwen2"),
        pytest.param(
            Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **TINY), id="one-sliding-layer"
        ),
        pytest.param(MistralConfig(sliding_window=8, head_dim=16, **TINY), id="sliding-window"),
    ],
)
def test_other_architectures_score_like_their_own_forward_pass(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # else they are zeros, and norms ones
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        model.save_pretrained(tmp_path)
    scheduler = scheduler_of(load(tmp_path))
    sequences = [sequence_of(prompt_of(3 + 9 * i, seed=i), 20, seed=i) for i in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run(scheduler, steps=2)
    run(scheduler)

    for sequence in sequences:
        assert_scored_by(tmp_path, sequence)
    is_plain = config.model_type != "mistral" and config.rope_parameters["rope_type"] == "default"
    assert isinstance(scheduler._runner.model, PlainModel) == is_plain


def test_rounding_to_less_than_32_bits_is_the_forward_passs_own(old_model: Path) -> None:
    runner, prompt = load(old_model, dtype="bfloat16"), prompt_of(30)
    runner.reserve(1, len(prompt))
    model = AutoModelForCausalLM.from_pretrained(old_model, dtype=torch.bfloat16)
    scores = torch.log_softmax(runner.prefill([prompt], [0])[0].float(), dim=-1)

    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), dim=-1)
    torch.testing.assert_close(scores, expected, atol=0.01, rtol=0)


def test_a_model_with_another_kind_of_attention_is_a_users_mistake(tmp_path: Path) -> None:
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(Gemma2Config(head_dim=16, **TINY)).save_pretrained(tmp_path)

    with pytest.raises(UserError, match="got Gemma2Attention, which wants soft-capping, need plain attention"):
        load(tmp_path)


def test_greedy_tokens_are_the_most_likely_ones(scheduler: Scheduler, old_model: Path) -> None:
    sequence = sequence_of(prompt_of(9), 12, temperature=0.0)
    scheduler.submit(sequence)
    run(scheduler)

    expected = reference_distribution(old_model, sequence.prompt_ids, sequence.output_ids)
    assert sequence.output_ids == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "steering",
    [
        {},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"min_new_tokens": 15, "logit_bias": {1: 50.0}},
        {"regex": "(0|1|22|333){60}"},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_alone_in_company_and_after_a_retraction(
    scheduler: Scheduler, old_model: Path, steering: dict[str, Any]
) -> None:
    """What a steered answer has said so far goes on to count."""
    grammars = Grammars(load_tokenizer(old_model), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_ID}))

    def sequence() -> RunningSequence:
        made = sequence_of(prompt_of(10), 20, seed=7, **steering)
        made.stop_token_ids = made.end_token_ids = frozenset({EOS_ID})
        if made.params.grammar:
            made.grammar = asyncio.run(grammars.begin(*made.params.grammar))
        return made

    alone, in_company, retracted = (sequence() for _ in range(3))
    scheduler.submit(alone)
    run(scheduler)
    for seed in range(3):
        scheduler.submit(sequence_of(prompt_of(17 + seed, seed=seed), 30, seed=seed))
    run(scheduler, steps=4)
    scheduler.submit(in_company)
    run(scheduler)
    scheduler.submit(retracted)
    run(scheduler, steps=5)
    scheduler.pause(PauseMode.RETRACT)
    scheduler.resume()
    run(scheduler)

    assert in_company.output_ids == alone.output_ids
    assert retracted.output_ids == alone.output_ids


def test_unequal_seeds_give_unequal_tokens(scheduler: Scheduler) -> None:
    first, second = (sequence_of(prompt_of(10), 20, seed=seed) for seed in (1, 2))
    scheduler.submit(first)
    scheduler.submit(second)
    run(scheduler)

    assert first.output_ids != second.output_ids


def test_siblings_copy_the_prompt_and_score_the_same(scheduler: Scheduler, old_model: Path) -> None:
    prompt = prompt_of(20)
    siblings = [sequence_of(prompt, 12, seed=seed) for seed in range(4)]
    for sibling in siblings[:3]:
        scheduler.submit(sibling)
    run(scheduler, steps=3)
    scheduler.submit(siblings[3])
    run(scheduler)

    assert [sibling.cached_tokens for sibling in siblings] == [0, 19, 19, 19]
    for sibling in siblings:
        assert_scored_by(old_model, sibling)


def test_a_prompt_computed_by_old_weights_is_not_copied(scheduler: Scheduler, old_model: Path, new_model: Path) -> None:
    prompt = prompt_of(20)
    early, late = sequence_of(prompt, 30, seed=1), sequence_of(prompt, 5, seed=2)
    scheduler.submit(early)
    run(scheduler, steps=3)
    scheduler.pause(PauseMode.IN_PLACE)
    scheduler.apply_weights(stage_weights(scheduler._runner.model, str(new_model)), "0-1")
    scheduler.resume()
    scheduler.submit(late)
    run(scheduler)

    assert late.cached_tokens == 0
    assert_scored_by(new_model, late)


def test_after_a_retracting_swap_tokens_are_scored_by_the_new_weights(
    scheduler: Scheduler, old_model: Path, new_model: Path
) -> None:
    sequences = [sequence_of(prompt_of(5 + i, seed=i), 25, seed=i) for i in range(4)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run(scheduler, steps=2)
    scheduler.pause(PauseMode.RETRACT)
    splits = [len(sequence.output_ids) for sequence in sequences]
    scheduler.apply_weights(stage_weights(scheduler._runner.model, str(new_model)), "0-1")
    scheduler.resume()
    run(scheduler)

    for sequence, split in zip(sequences, splits, strict=True):
        assert 0 < split < 25
        assert sequence.version_spans("0-1") == [
            {"version": "0-0", "start": 0, "end": split},
            {"version": "0-1", "start": split, "end": 25},
        ]
        assert_scored_by(old_model, sequence, end=split)
        assert_scored_by(new_model, sequence, start=split)


def test_an_in_place_swap_keeps_the_cache_and_stamps_the_tokens(
    scheduler: Scheduler, old_model: Path, new_model: Path
) -> None:
    sequence = sequence_of(prompt_of(6), 20)
    scheduler.submit(sequence)
    run(scheduler, steps=4)
    scheduler.pause(PauseMode.IN_PLACE)
    split = len(sequence.output_ids)
    scheduler.apply_weights(stage_weights(scheduler._runner.model, str(new_model)), "0-1")
    scheduler.resume()
    run(scheduler)

    assert sequence.num_retractions == 0
    assert [span["end"] for span in sequence.version_spans("0-1")] == [split, 20]
    assert_scored_by(old_model, sequence, end=split)
    with pytest.raises(AssertionError):
        assert_scored_by(new_model, sequence, start=split)


def test_a_pause_stops_every_step(scheduler: Scheduler) -> None:
    sequence = sequence_of(prompt_of(6), 20)
    scheduler.submit(sequence)
    run(scheduler, steps=2)
    scheduler.pause(PauseMode.IN_PLACE)

    assert not scheduler.has_work
    assert scheduler.num_running == 1


def test_an_aborting_pause_ends_sequences_with_what_they_had(scheduler: Scheduler) -> None:
    sequence = sequence_of(prompt_of(6), 20)
    scheduler.submit(sequence)
    run(scheduler, steps=2)
    scheduler.pause(PauseMode.ABORT)

    assert sequence.finish_reason is not None
    assert sequence.finish_reason["type"] == "abort"
    assert len(sequence.output_ids) == 3
    assert scheduler.num_running == 0


def test_more_sequences_than_slots_wait_and_all_finish(old_model: Path) -> None:
    scheduler = scheduler_of(load(old_model), max_running=3)
    sequences = [sequence_of(prompt_of(4 + i, seed=i), 3 + i, seed=i) for i in range(10)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.step()

    assert scheduler.num_running <= 3
    run(scheduler)
    for sequence in sequences:
        assert_scored_by(old_model, sequence)


def test_a_small_cache_budget_admits_only_what_can_grow_to_its_end(old_model: Path) -> None:
    runner = load(old_model, max_total_tokens=120)
    scheduler = scheduler_of(runner)
    sequences = [sequence_of(prompt_of(10, seed=i), 30, seed=i) for i in range(5)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.step()

    assert scheduler.num_running == 3
    run(scheduler)
    assert runner.cache.num_slots * runner.cache.slot_tokens <= 120
    for sequence in sequences:
        assert_scored_by(old_model, sequence)


def groups() -> list[RunningSequence]:
    return [
        sequence_of(prompt_of(20, seed=group), 30, seed=4 * group + sibling)
        for group in range(4)
        for sibling in range(4)
    ]


def test_groups_that_begin_anew_cost_two_passes_and_one_cache(old_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(old_model)
    scheduler = scheduler_of(runner, max_prefill_tokens=1000)
    for sequence in groups():
        scheduler.submit(sequence)
    run(scheduler, steps=6)
    passes, sizes = list[int](), list[tuple[int, int]]()
    prefill, resize = runner.prefill, runner.cache.resize
    monkeypatch.setattr(
        runner, "prefill", lambda prompts, *rest: (passes.append(len(prompts)), prefill(prompts, *rest))[1]
    )
    monkeypatch.setattr(runner.cache, "resize", lambda *size: (sizes.append(size), resize(*size)))

    scheduler.pause(PauseMode.RETRACT)
    assert scheduler.flush_cache()
    scheduler.resume()
    scheduler.step()

    assert passes == [4, 12]  # one of each group, and then its siblings, who go on from its prompt
    assert len(sizes) == 1
    assert scheduler.num_running == 16


def test_siblings_that_go_on_from_a_pass_are_charged_to_it_in_order(old_model: Path) -> None:
    scheduler = scheduler_of(load(old_model), max_prefill_tokens=1000)
    sequences = groups()
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler, steps=6)
    scheduler.pause(PauseMode.RETRACT)
    assert scheduler.flush_cache()
    scheduler.resume()
    scheduler._max_prefill_tokens = 64  # one of 27, three that go on from 20 of them, and no other of 27

    scheduler.step()

    assert {sequences.index(sequence) for sequence in scheduler._running} == {0, 1, 2, 3}
    assert [sequences.index(sequence) for sequence in scheduler._waiting] == [*range(4, 16)]
    run(scheduler)
    for sequence in sequences:
        assert_scored_by(old_model, sequence)


def test_a_step_has_two_passes_however_long_a_chain_of_prompts_is(old_model: Path) -> None:
    scheduler = scheduler_of(load(old_model), max_prefill_tokens=1000)
    chain = prompt_of(36, seed=1)
    prompts = [chain[:20], chain[:24], chain[:28], chain[:32], prompt_of(20, seed=2)]
    sequences = [sequence_of(prompt, 8, seed=seed) for seed, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.submit(sequence)

    scheduler.step()

    assert {sequences.index(sequence) for sequence in scheduler._running} == {0, 1, 4}
    assert [sequences.index(sequence) for sequence in scheduler._waiting] == [2, 3]
    run(scheduler)
    for sequence in sequences:
        assert_scored_by(old_model, sequence)


def test_room_for_a_long_one_that_waits_is_not_made_before_others_found_what_is_held(old_model: Path) -> None:
    scheduler = scheduler_of(load(old_model, max_total_tokens=480), max_running=8, max_prefill_tokens=1000)
    said = [sequence_of(prompt_of(20, seed=seed), 9, seed=seed) for seed in range(8)]
    for sequence in said:
        scheduler.submit(sequence)
    run(scheduler)
    turns = [sequence_of([*one.prompt_ids, *one.output_ids, 1], 4, seed=20) for one in said[:2]]
    for sequence in (*turns, sequence_of(prompt_of(20, seed=9), CONTEXT_LENGTH - 20, seed=9)):
        scheduler.submit(sequence)

    run(scheduler)

    assert [sequence.cached_tokens for sequence in turns] == [28, 28]


def test_prompts_too_many_for_one_pass_give_the_logits_each_gives_alone(
    old_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(old_model)
    prompts = [prompt_of(length, seed=length) for length in (9, 30, 4, 41, 1, 17)]
    runner.reserve(len(prompts), CONTEXT_LENGTH)
    monkeypatch.setattr("areal_async.inference.embedded.engine.runner._CPU_PASS_TOKENS", 32)
    positions = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full_like(positions, VOCAB_SIZE - 1)

    together = runner.prefill(prompts, range(len(prompts)))
    after_together = runner.decode(ids, positions, [Band(len(prompts), CONTEXT_LENGTH)])
    runner.cache.clear()
    runner.reserve(len(prompts), CONTEXT_LENGTH)
    alone = torch.cat([runner.prefill([prompt], [slot]) for slot, prompt in enumerate(prompts)])
    after_alone = runner.decode(ids, positions, [Band(len(prompts), CONTEXT_LENGTH)])

    assert torch.allclose(together, alone, atol=TOLERANCE)
    assert torch.allclose(after_together, after_alone, atol=TOLERANCE)


def test_a_sequence_may_fill_the_whole_context(scheduler: Scheduler, old_model: Path) -> None:
    prompt = prompt_of(CONTEXT_LENGTH - 40)
    sequence = sequence_of(prompt, 38)
    scheduler.submit(sequence)
    run(scheduler)

    assert_scored_by(old_model, sequence)


def test_broken_weights_end_sequences_and_leave_nothing_behind(scheduler: Scheduler, old_model: Path) -> None:
    broken = stage_weights(scheduler._runner.model, str(old_model))
    broken.tensors["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
    victim = sequence_of(prompt_of(40), 10)
    scheduler.apply_weights(broken, "0-1")
    scheduler.submit(victim)
    run(scheduler)
    scheduler.apply_weights(stage_weights(scheduler._runner.model, str(old_model)), "0-2")
    survivor = sequence_of(prompt_of(6), 20)
    scheduler.submit(survivor)
    run(scheduler)

    assert victim.finish_reason is not None
    assert victim.finish_reason["status_code"] == 500
    assert_scored_by(old_model, survivor)


def test_flushing_is_refused_while_a_sequence_needs_its_cache(scheduler: Scheduler) -> None:
    scheduler.submit(sequence_of(prompt_of(6), 20))
    run(scheduler, steps=1)

    assert not scheduler.flush_cache()
    scheduler.pause(PauseMode.RETRACT)
    assert scheduler.flush_cache()


def test_the_cache_is_dropped_when_its_memory_is_released_and_built_again_when_it_is_resumed(old_model: Path) -> None:
    runner = load(old_model)
    scheduler = scheduler_of(runner)
    sequence = sequence_of(prompt_of(6), 20)
    scheduler.submit(sequence)
    run(scheduler, steps=1)
    assert not scheduler.release_memory(), "somebody needs it"
    scheduler.pause(PauseMode.RETRACT)

    assert scheduler.release_memory()
    assert runner.cache.bytes_per_token == 0, "no tensor is left"
    scheduler.resume()
    assert not scheduler.has_work, "nobody may run without it"
    assert scheduler.resume_memory()
    run(scheduler)
    assert runner.cache.bytes_per_token > 0
    assert sequence.num_retractions == 1
    assert_scored_by(old_model, sequence)
    assert not scheduler.resume_memory(), "it was not released"
