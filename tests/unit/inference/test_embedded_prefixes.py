"""What a slot holds of a prompt is not computed again, and nobody can tell by the tokens or their probabilities."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_async.inference.embedded.engine.compute.held import HeldTokens
from areal_async.inference.embedded.engine.scheduler import PauseMode, Scheduler
from areal_async.inference.embedded.engine.sequence import RunningSequence
from areal_async.inference.embedded.engine.weights import stage_weights
from tests.unit.inference.embedded_engine import prompt_of
from tests.unit.inference.test_embedded_scheduler import assert_scored_by, load, run, scheduler_of, sequence_of


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def counting(model: Path, **options: Any) -> tuple[Scheduler, list[int]]:
    """Return a scheduler and the list to which each pass adds how many tokens of prompts it computed."""
    runner, passes = load(model), list[int]()
    prefill = runner.prefill

    def counted(prompts: Sequence[Sequence[int]], *others: Any) -> torch.Tensor:
        passes.append(sum(map(len, prompts)))
        return prefill(prompts, *others)

    runner.prefill = counted  # type: ignore[method-assign]
    return scheduler_of(runner, **options), passes


def finish(scheduler: Scheduler, *sequences: RunningSequence) -> None:
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler)


def next_turn(sequence: RunningSequence, said: int, num_tokens: int = 20, **sampling: Any) -> RunningSequence:
    """Return the conversation's next turn, after ``said`` more tokens."""
    return sequence_of([*sequence.tokens, *prompt_of(said, seed=said)], num_tokens, **sampling)


def test_a_next_turn_computes_only_what_is_new(models: list[Path]) -> None:
    scheduler, passes = counting(models[0])
    first = sequence_of(prompt_of(40), 20)
    finish(scheduler, first)
    second = next_turn(first, 10, seed=1, temperature=0.7)
    finish(scheduler, second)

    assert passes == [40, 11]  # the last sampled token was never fed
    assert second.cached_tokens == 59
    assert_scored_by(models[0], second)


def test_tokens_are_those_without_the_cache(models: list[Path]) -> None:
    scheduler, passes = counting(models[0])
    first = sequence_of(prompt_of(40), 20)
    finish(scheduler, first)
    seconds = [next_turn(first, said, seed=said) for said in (1, 3, 10)]
    finish(scheduler, *seconds)
    scheduler._runner.cache.held.clear()
    again = [next_turn(first, said, seed=said) for said in (1, 3, 10)]
    for sequence in again:
        finish(scheduler, sequence)
        scheduler._runner.cache.held.clear()

    # The others wait a step for what the first computes: they share one token more with it than with the turn before.
    assert passes == [40, 2, 3 + 10, 61, 63, 70]
    assert [one.output_ids for one in again] == [one.output_ids for one in seconds]
    for one, other in zip(again, seconds, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)


def test_prompts_of_one_template_compute_it_once(models: list[Path]) -> None:
    scheduler, passes = counting(models[0], max_prefill_tokens=1000)
    template = prompt_of(40)
    sequences = [sequence_of([*template, *prompt_of(5 + i, seed=9 + i)], 10, seed=i) for i in range(4)]
    finish(scheduler, *sequences)

    assert passes == [45, 6 + 7 + 8]
    for sequence in sequences:
        assert_scored_by(models[0], sequence)


def test_other_weights_compute_everything_again(models: list[Path]) -> None:
    scheduler, passes = counting(models[0])
    first, swapped = sequence_of(prompt_of(40), 20), sequence_of(prompt_of(30, seed=5), 20, seed=5)
    finish(scheduler, first)
    scheduler.submit(swapped)
    run(scheduler, steps=5)
    scheduler.apply_weights(stage_weights(scheduler._runner.model, str(models[1])), "0-1")
    run(scheduler)
    seconds = [next_turn(first, 10), next_turn(swapped, 10, seed=2)]
    finish(scheduler, *seconds)

    assert [one.cached_tokens for one in seconds] == [0, 0]
    assert passes == [40, 30, 70, 60]
    for sequence in seconds:
        assert_scored_by(models[1], sequence)
    spans = swapped.version_spans(scheduler.weight_version)
    assert [(span["version"], span["start"]) for span in spans] == [("0-0", 0), ("0-1", len(swapped.logprobs) - 15 + 1)]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_retracted_sequence_goes_on_from_what_the_same_weights_computed(
    models: list[Path], *, is_swapped: bool
) -> None:
    scheduler, passes = counting(models[0])
    sequences = [sequence_of(prompt_of(20 + 5 * i, seed=i), 30, seed=i) for i in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler, steps=8)
    num_before = sum(passes)
    made = [len(sequence.output_ids) for sequence in sequences]
    scheduler.pause(PauseMode.RETRACT)
    if is_swapped:
        scheduler.apply_weights(stage_weights(scheduler._runner.model, str(models[1])), "0-1")
    scheduler.resume()
    run(scheduler)

    assert sum(passes) - num_before == (sum(20 + 5 * i + made[i] for i in range(3)) if is_swapped else 0)
    for sequence, start in zip(sequences, made, strict=True):
        assert_scored_by(models[is_swapped], sequence, start=start if is_swapped else 0)


def test_an_aborted_answer_is_gone_on_from(models: list[Path]) -> None:
    scheduler, passes = counting(models[0])
    others = [sequence_of(prompt_of(25, seed=i), 40, seed=i) for i in range(1, 4)]
    first = sequence_of(prompt_of(40), 40)
    for sequence in (first, *others):
        scheduler.submit(sequence)
    run(scheduler, steps=12)
    scheduler.abort(first.rid)
    second = next_turn(first, 10, seed=8)
    finish(scheduler, second)

    assert passes[-1] == 11
    for sequence in (second, *others):
        assert_scored_by(models[0], sequence)


def test_conversations_are_found_again_while_others_come_and_go(models: list[Path]) -> None:
    scheduler, passes = counting(models[0], max_running=4)
    turns = [sequence_of(prompt_of(20 + i, seed=i), 5 + i, seed=i) for i in range(4)]
    for _ in range(3):
        finish(scheduler, *turns)
        for sequence in turns:
            assert_scored_by(models[0], sequence)
        turns = [next_turn(sequence, 4 + i, 5 + i, seed=i) for i, sequence in enumerate(turns)]

    assert passes == [20 + 21 + 22, 23, *[5 + 6 + 7 + 8] * 2]


def test_a_row_that_holds_nothing_is_not_found() -> None:
    held = HeldTokens(2, 8)
    held.put(1, [5, 6, 7])

    assert held.find([5, 6, 9, 9], ()) == (1, 2)
    assert held.find([5, 6, 7], ()) == (1, 3)
    held.clear()
    assert held.find([5, 6, 7], ())[1] == 0


def test_the_row_of_least_use_is_the_one_given_up() -> None:
    held = HeldTokens(3, 8)
    for slot in (2, 0, 1):
        held.put(slot, [slot])
    held.find([2], ())

    assert held.oldest(0) == 0
    assert held.oldest(1) == 1
