"""Merging keeps every sampled token once, with its logprob and version, and trains a shared prefix once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_async.protocol.types import NOT_CREDITED, NOT_SAMPLED, Turn, Version, VersionSpan
from areal_async.rollout.policy.merge import merge_turns

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def turn_of(prompt_ids: list[int], output_ids: list[int], version: str = "1-0") -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=[-float(token) - 0.5 for token in output_ids],
        spans=[VersionSpan(version=version, start=0, end=len(output_ids))],
        oldest=version,
        finish_reason="stop",
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns of which some extend the one before and some do not."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 5))):
        prompt_ids = draw(tokens)
        if turns and draw(st.booleans()):
            prompt_ids = turns[-1].prompt_ids + turns[-1].output_ids + prompt_ids
        turns.append(turn_of(prompt_ids, draw(tokens), f"1-{number}"))
    return turns


@given(conversations())
def test_every_sampled_token_is_in_one_row_with_its_logprob_and_version(turns: list[Turn]) -> None:
    rows = merge_turns(turns)

    sampled = [
        (int(token), float(logprob), int(version))
        for row in rows
        for token, logprob, version in zip(
            row.token_ids[row.loss_mask], row.logprobs[row.loss_mask], row.versions[row.loss_mask], strict=True
        )
    ]
    expected = [
        (token, logprob, Version.parse(turn.spans[0].version).pack())
        for turn in turns
        for token, logprob in zip(turn.output_ids, turn.logprobs, strict=True)
    ]
    assert sorted(sampled) == sorted(expected)


@given(conversations())
def test_columns_align_and_say_nothing_of_tokens_that_were_not_sampled(turns: list[Turn]) -> None:
    for row in merge_turns(turns):
        assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs) == len(row.versions)
        assert not row.logprobs[~row.loss_mask].any()
        assert (row.versions[~row.loss_mask] == NOT_SAMPLED).all()


@given(conversations())
def test_each_row_is_the_whole_text_of_its_last_turn(turns: list[Turn]) -> None:
    texts = [turn.prompt_ids + turn.output_ids for turn in turns]

    assert all(list(row.token_ids) in texts for row in merge_turns(turns))


def test_turns_that_extend_each_other_are_one_row() -> None:
    first = turn_of([1, 2], [3, 4], "1-0")
    second = turn_of([1, 2, 3, 4, 9, 9], [5], "1-1")

    (row,) = merge_turns([first, second])

    assert row.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert row.logprobs.tolist() == [0, 0, -3.5, -4.5, 0, 0, -5.5]
    old, new = Version(1, 0).pack(), Version(1, 1).pack()
    assert row.versions.tolist() == [-1, -1, old, old, -1, -1, new]
    assert row.token_ids.dtype == np.int32


def test_versions_follow_the_spans_inside_a_turn() -> None:
    turn = Turn(
        prompt_ids=[1],
        output_ids=[2, 3, 4],
        logprobs=[-1.0, -1.0, -1.0],
        spans=[VersionSpan(version="1-0", start=0, end=1), VersionSpan(version="2-7", start=1, end=3)],
        oldest="1-0",
        finish_reason="stop",
    )

    (row,) = merge_turns([turn])

    assert [str(Version.unpack(version)) for version in row.versions[1:].tolist()] == ["1-0", "2-7", "2-7"]


def test_every_sampled_token_knows_what_its_turn_was_asked_for_at() -> None:
    first = replace(turn_of([1, 2], [3, 4]), temperature=0.7)
    second = replace(turn_of([1, 2, 3, 4, 9], [5]), temperature=0.0)

    (row,) = merge_turns([first, second])

    assert row.temperatures is not None
    assert row.temperatures[row.loss_mask].tolist() == [np.float32(0.7), np.float32(0.7), 0.0]


def test_a_conversation_of_one_temperature_holds_one_value_its_prompts_included() -> None:
    turns = [replace(turn_of([1, 2], [3, 4]), temperature=0.7), replace(turn_of([1, 2, 3, 4, 9], [5]), temperature=0.7)]

    (row,) = merge_turns(turns)

    assert row.temperatures is not None
    assert set(row.temperatures.tolist()) == {np.float32(0.7)}
    assert merge_turns([turn_of([1], [2])])[0].temperatures is None


def test_tokens_of_a_steered_turn_are_known_as_such_and_no_others() -> None:
    first = replace(turn_of([1, 2], [3, 4]), is_steered=True)
    second = turn_of([1, 2, 3, 4, 9], [5])

    (row,) = merge_turns([first, second])

    assert row.steered is not None
    assert row.steered.tolist() == [False, False, True, True, False, False]
    assert merge_turns([second])[0].steered is None


def test_prompt_that_rewrites_what_was_said_starts_a_new_row() -> None:
    rows = merge_turns([turn_of([1, 2], [3, 4]), turn_of([1, 2, 9], [5])])

    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 9, 5]]


def test_conversations_held_side_by_side_keep_a_row_each() -> None:
    rows = merge_turns([turn_of([1], [2]), turn_of([3], [4]), turn_of([1, 2, 7], [8]), turn_of([3, 4, 7], [9])])

    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 7, 8], [3, 4, 7, 9]]


@given(conversations(), st.data())
def test_every_token_of_a_credited_turn_knows_its_credit_and_no_other_token_does(
    turns: list[Turn], data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(turns) - 1)))
    credits = {place: number for number, place in enumerate(sorted(chosen))}

    rows = merge_turns(turns, credits)

    found: dict[int, list[int]] = {number: [] for number in credits.values()}
    for row in rows:
        assert row.turns is not None
        assert (row.turns[~row.loss_mask] == NOT_CREDITED).all()
        for token, number in zip(row.token_ids, row.turns, strict=True):
            if number != NOT_CREDITED:
                found[int(number)].append(int(token))
    assert found == {number: turns[place].output_ids for place, number in credits.items()}
    assert all(row.turns is None for row in merge_turns(turns))


def test_a_row_of_one_reward_that_nothing_steered_makes_no_column_that_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[np.dtype[Any]] = []
    for name in ("zeros", "full"):
        make = getattr(np, name)
        monkeypatch.setattr(np, name, lambda *given, make=make, dtype: made.append(dtype) or make(*given, dtype=dtype))

    (row,) = merge_turns([replace(turn_of([1, 2], [3, 4]), temperature=0.7)])

    assert (row.turns, row.steered) == (None, None)
    assert made == [np.bool_, np.float32, np.int64, np.float32]  # loss mask, logprobs, versions, temperatures
    assert merge_turns([replace(turn_of([1], []), is_steered=True)])[0].steered is None
