"""Rows expand and collapse without loss, and positions are those that the models give themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from areal_async.vision.rows import collapse, expand, positions
from areal_async.vision.spec import FAMILIES, Grid, VisionSpec
from tests.unit.vision.specs import shipped

SPEC = shipped("qwen3_vl", image_token_id=7, vision_start_token_id=8, vision_end_token_id=9)
START, PAD, END = SPEC.vision_start_token_id, SPEC.image_token_id, SPEC.vision_end_token_id

texts = st.lists(st.integers(0, 30).filter(lambda token: token not in {START, PAD, END}), max_size=6)
grids_of_images = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4)


def grid_of(height: int, width: int) -> Grid:
    """Return the grid of an image of that many rows and columns of tokens."""
    return Grid(1, height * SPEC.merge_size, width * SPEC.merge_size)


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], list[Grid]]:
    """Draw a collapsed row and the grids of its images."""
    ids = draw(texts)
    grids = [grid_of(*sides) for sides in draw(grids_of_images)]
    for _ in grids:
        ids += [START, PAD, END, *draw(texts)]
    return ids, grids


@given(documents())
def test_collapse_undoes_expand(document: tuple[list[int], list[Grid]]) -> None:
    ids, grids = document

    expanded = expand(ids, grids, SPEC)

    assert collapse(expanded, SPEC) == ids
    assert expand(collapse(expanded, SPEC), grids, SPEC) == expanded
    assert len(expanded) == len(ids) + sum(SPEC.num_tokens(grid) - 1 for grid in grids)
    assert collapse(ids, SPEC) == ids


def models() -> dict[str, Any]:
    """Build the two families with one layer: positions take no weights."""
    text = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16}
    ids = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
    qwen3 = Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}, **ids)
    qwen2_5 = Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"fullatt_block_indexes": [0]}, **ids)
    return {
        "qwen3_vl": Qwen3VLForConditionalGeneration(qwen3).model,
        "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration(qwen2_5).model,
    }


MODELS = models()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sides", [[], [(2, 3)], [(1, 1), (5, 2), (2, 7)]], ids=["none", "one", "three"])
def test_positions_are_those_of_transformers(family: str, sides: list[tuple[int, int]]) -> None:
    grids = [grid_of(*pair) for pair in sides]
    ids = [1, 2, 3]
    for number, _ in enumerate(grids):
        ids += [START, PAD, END, *range(10, 10 + number)]
    expect_positions_of_transformers(MODELS[family], expand([*ids, 4, 5], grids, SPEC), grids)


@given(documents().filter(lambda document: bool(document[0])))
def test_positions_of_any_document_are_those_of_transformers(document: tuple[list[int], list[Grid]]) -> None:
    ids, grids = document
    for model in MODELS.values():
        expect_positions_of_transformers(model, expand(ids, grids, SPEC), grids)


def expect_positions_of_transformers(model: Any, ids: list[int], grids: list[Grid]) -> None:
    row = torch.tensor([ids])
    theirs, delta = model.get_rope_index(row, (row == PAD).int(), torch.tensor(grids) if grids else None)

    ours, our_delta = positions(ids, grids, SPEC)

    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, theirs[:, 0].numpy())
    assert our_delta == int(delta)


def test_empty_row_has_no_positions() -> None:
    placed, delta = positions([], [], SPEC)

    assert (placed.shape, delta) == ((3, 0), 0)


def test_token_after_the_row_is_where_the_delta_says() -> None:
    grids = [grid_of(2, 3)]
    ids = expand([1, START, PAD, END], grids, SPEC)

    _, delta = positions(ids, grids, SPEC)
    longer, _ = positions([*ids, 5], grids, SPEC)

    assert longer[:, -1].tolist() == [len(ids) + delta] * 3


@pytest.mark.parametrize("ids", [[PAD, END], [START, PAD], [1, PAD, END], [START, PAD, 1], [START, PAD, 1, PAD, END]])
def test_placeholder_without_its_marks_is_refused(ids: list[int]) -> None:
    """A model may have sampled it: no image belongs to it."""
    for refuse in (
        lambda: expand(ids, [grid_of(1, 1)], SPEC),
        lambda: collapse(ids, SPEC),
        lambda: positions(ids, [grid_of(1, 1)], SPEC),
    ):
        with pytest.raises(ValueError, match="at token . without both marks around, need 8 before and 9 after it"):
            refuse()


@pytest.mark.parametrize("num_grids", [0, 2])
def test_every_image_has_a_grid(num_grids: int) -> None:
    grids = [grid_of(1, 1)] * num_grids
    for refuse in (expand, positions):
        with pytest.raises(ValueError, match=f"got {num_grids} images, need 1"):
            refuse([START, PAD, END], grids, SPEC)


def test_row_is_expanded_once() -> None:
    with pytest.raises(ValueError, match="got 2 placeholders for the image at token 4, need one"):
        expand([START, PAD, END, START, PAD, PAD, END], [grid_of(1, 1), grid_of(1, 2)], SPEC)


def test_positions_need_the_expanded_row() -> None:
    with pytest.raises(ValueError, match="got 1 placeholders for the image at token 1, need 6"):
        positions([START, PAD, END], [grid_of(2, 3)], SPEC)


def test_grid_of_no_image_is_refused() -> None:
    for refuse in (expand, positions):
        with pytest.raises(ValueError, match="got 1 x 3 x 2 patches"):
            refuse([START, PAD, END], [Grid(1, 3, 2)], SPEC)


def test_tokens_are_those_of_a_spec() -> None:
    other = VisionSpec(**{name: getattr(SPEC, name) for name in SPEC.__slots__} | {"image_token_id": 5})

    assert collapse([PAD, 8, 5, 5, 9], other) == [PAD, 8, 5, 9]
