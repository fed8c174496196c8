"""A decoder of any family can be cut, and its stages one after the other say what the whole one says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_async.errors import UserError
from areal_async.trainer.engine.attention import PACKED, register_packed_attention
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.parallel.stages import Stage, divide, split_evenly, stage_of
from areal_async.trainer.packing.rows import PackedRow, pack_rows
from tests.unit.trainer.models import FAMILIES, random_rows, save_model

NUM_LAYERS = 5


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "granite"])
@pytest.mark.parametrize("num_stages", [2, 5])
def test_stages_of_a_decoder_say_what_the_whole_one_says(family: str, num_stages: int, tmp_path: Path) -> None:
    """Granite scales its embedding on the way to the layers, which must happen once."""
    scale = {"embedding_multiplier": 3.0} if family == "granite" else {}
    decoder = _load(save_model(tmp_path, family=family, num_layers=NUM_LAYERS, **scale))
    row = pack_rows(random_rows(3), torch.device("cpu"))
    expected = PolicyModel(decoder)(row)
    whole_gradient = _gradients(decoder, expected)

    parts = divide(decoder, num_stages)
    stages = [stage_of(decoder, parts, number, wrap=PolicyModel) for number in range(num_stages)]
    logprobs_S, entropy_S = _through(stages, row)

    torch.testing.assert_close(logprobs_S, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(entropy_S, expected[1], rtol=0, atol=0)
    torch.testing.assert_close(_gradients(decoder, (logprobs_S, entropy_S)), whole_gradient)


def test_every_weight_is_in_a_stage_under_its_own_name_and_only_tied_ones_in_two(tmp_path: Path) -> None:
    decoder = _load(save_model(tmp_path, num_layers=NUM_LAYERS))
    parts = divide(decoder, 3)

    names = [
        name
        for number in range(3)
        for name, _ in stage_of(decoder, parts, number, wrap=PolicyModel).decoder.named_parameters()
    ]

    assert sorted(names) == sorted([*dict(decoder.named_parameters()), "lm_head.weight"])


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    decoder = _load(save_model(tmp_path, num_layers=2))
    with pytest.raises(UserError, match=r"got 2 layers of qwen3 for 3 stages.*lower trainer\.pipeline_parallel"):
        divide(decoder, 3)


def test_layers_are_divided_so_that_the_dearest_stage_is_cheap() -> None:
    assert split_evenly([1.0] * 8, num_parts=4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    # The last layer carries a head that costs two more.
    assert split_evenly([1.0, 1.0, 1.0, 1.0, 1.0, 3.0], num_parts=2) == [range(4), range(4, 6)]
    with pytest.raises(ValueError, match="need one for each"):
        split_evenly([1.0], num_parts=2)


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED).eval()


def _through(stages: Sequence[Stage], row: PackedRow) -> tuple[Tensor, Tensor]:
    """Send a row through all stages, with states wider than it is."""
    states: Any = torch.zeros(1)
    for stage in stages:
        stage.begin([row], width=len(row.token_ids_T) + 7)
        states = stage(states)
    return states


def _gradients(decoder: Any, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    parameters = dict(decoder.named_parameters())
    gradients = torch.autograd.grad(scores[0].sum() + 0.1 * scores[1].sum(), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))
