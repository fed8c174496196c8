"""A packed row scores each trained token once, from the position before it; positions start anew in each sequence."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_async.trainer.packing.rows import TrainRow, pack_rows

CPU = torch.device("cpu")


def row(tokens: list[int], mask: list[bool], **given: Any) -> TrainRow:
    size = len(tokens)
    defaults: dict[str, Any] = {
        "behave_logprobs": -np.arange(size, dtype=np.float32),
        "advantage": 1.0,
        "current_mask": np.array(mask),
    }
    return TrainRow(token_ids=np.array(tokens, np.int32), loss_mask=np.array(mask), **defaults | given)


def test_scored_tokens_stand_one_position_behind_what_predicts_them() -> None:
    packed = pack_rows(
        [row([5, 6, 7], [False, True, True], advantage=2.0), row([8, 9], [False, True], advantage=-1.0)], CPU
    )

    assert packed.lengths == [3, 2]
    assert packed.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert packed.predicting_S.tolist() == [0, 1, 3]
    assert packed.targets_S.tolist() == [6, 7, 9]
    assert packed.behave_S.tolist() == [-1.0, -2.0, -1.0]
    assert packed.advantages_S.tolist() == [2.0, 2.0, -1.0]


def test_an_advantage_may_differ_from_token_to_token() -> None:
    advantage = np.array([0.0, 0.5, -0.5], np.float32)

    packed = pack_rows([row([5, 6, 7], [False, True, True], advantage=advantage)], CPU)

    assert packed.advantages_S.tolist() == [0.5, -0.5]


def test_scored_tokens_of_one_temperature_share_one_number_and_others_have_their_own() -> None:
    mask, half = [False, True, True], np.float32(0.5)
    mixed = row([5, 6, 7], mask, temperature=np.array([9.0, 0.5, 1.5], np.float32))
    same = row([5, 6, 7], mask, temperature=np.array([9.0, 0.5, 0.5], np.float32))

    alone = [pack_rows(one, CPU).temperature for one in ([same], [same, row([8, 9], [False, True], temperature=half)])]
    packed = pack_rows([mixed, row([8, 9], [False, True])], CPU).temperature

    assert alone == [0.5, 0.5]
    assert isinstance(packed, torch.Tensor)
    assert packed.tolist() == [0.5, 1.5, 1.0]


def test_greedy_tokens_are_trained_at_temperature_one_as_servers_report_them() -> None:
    greedy = row([5, 6, 7], [False, True, True], temperature=np.array([1.0, 0.0, 1e-7], np.float32))

    assert pack_rows([greedy], CPU).temperature == 1.0
    assert pack_rows([row([5, 6], [False, True], temperature=0.0)], CPU).temperature == 1.0


@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=8))
def test_every_trained_token_is_scored_exactly_once(masks: list[list[bool]]) -> None:
    masks = [[False, *mask] for mask in masks] + [[False, True]]
    firsts = np.cumsum([0] + [len(mask) for mask in masks])
    rows = [row(list(range(first, first + len(mask))), mask) for first, mask in zip(firsts, masks, strict=False)]

    packed = pack_rows(rows, CPU)

    expected = np.flatnonzero(np.concatenate(masks)).tolist()
    assert packed.targets_S.tolist() == expected
    assert packed.predicting_S.tolist() == [token - 1 for token in expected]


def test_a_row_whose_first_token_is_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing predicts it"):
        row([5, 6], [True, True])


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="for 2 tokens"):
        row([5, 6], [False, True, True])
