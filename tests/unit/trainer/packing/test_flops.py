"""The operations counted are those that the model's matrices and its attention make."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_async.trainer.packing.flops import decoder_flops
from areal_async.vision.spec import Grid
from tests.unit.trainer.models import FAMILIES, save_model
from tests.unit.trainer.seeing import SEEING, save_seeing_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_count_of_a_model_is_that_of_its_operations(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path / family, family=family, tied=tied)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    flops = decoder_flops(causal_lm)

    for num_tokens in (7, 40):
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            causal_lm(torch.zeros(1, num_tokens, dtype=torch.int64))

        # Eager attention makes every pair, of which a causal kernel makes those up to the diagonal.
        pairs_above = num_tokens * (num_tokens - 1) // 2
        expected = flops.forward(num_tokens, num_tokens) + flops.per_pair * pairs_above
        assert counter.get_total_flops() == expected


@pytest.mark.parametrize("family", SEEING)
def test_of_a_model_that_sees_the_language_model_is_counted(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        save_seeing_model(tmp_path, family), attn_implementation="eager"
    )
    flops = decoder_flops(model)

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.full((1, 7), 5))

    assert counter.get_total_flops() == flops.forward(7, 7) + flops.per_pair * 21


@pytest.mark.parametrize("family", SEEING)
def test_the_count_of_a_tower_is_that_of_its_operations(family: str, tmp_path: Path) -> None:
    """Windows of 2 x 2 tokens among them, the last ones of which are smaller."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        save_seeing_model(tmp_path, family), attn_implementation="eager"
    )
    tower, flops = model.base_model.visual, decoder_flops(model).tower
    assert flops is not None

    for grid in (Grid(1, 2, 2), Grid(1, 4, 8), Grid(1, 6, 10)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.zeros(grid.h * grid.w, 96), grid_thw=torch.tensor([grid]))

        assert counter.get_total_flops() == flops.forward(grid)


def test_training_costs_three_forward_passes_and_only_scored_tokens_pay_for_the_head(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    flops = decoder_flops(AutoModelForCausalLM.from_pretrained(model))

    assert flops.train(10, 4) == 3 * flops.forward(10, 4)
    assert flops.forward(10, 4) - flops.forward(10, 3) == flops.per_scored_token
    assert flops.forward(10, 4) == 10 * flops.per_token + 4 * flops.per_scored_token + 55 * flops.per_pair
