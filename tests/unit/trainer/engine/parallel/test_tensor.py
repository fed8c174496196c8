"""What the parts of a model must divide, and the scores of words that lie on several ranks."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.tensor import check_divisible, divided_scores, is_divided
from tests.unit.trainer.models import VOCAB


def decoder_of(**given: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    family = given.pop("family", "qwen3")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, num_hidden_layers=1, pad_token_id=0, **sizes | given)
    return cast(nn.Module, AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_decoders_of_the_usual_make_are_divided(family: str) -> None:
    check_divisible(decoder_of(family=family), 2)


@pytest.mark.parametrize(
    ("given", "parts", "message"),
    [
        ({}, 4, "got 4 for a model with num_key_value_heads=2, need a number that divides it"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, 4, "got 4 for a model with intermediate_size=50"),
        ({"family": "phi3"}, 2, "whose layers hold down_proj, gate_up_proj, o_proj, qkv_proj; need q_proj"),
        ({"family": "olmo2"}, 2, "whose q_norm is over all heads at once"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_sentence(given: dict[str, Any], parts: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_divisible(decoder_of(**given), parts)


def test_scores_over_divided_words_are_those_of_the_softmax_and_so_are_their_gradients(ranks: Ranks) -> None:
    """In float64, on one part; that two make the same of it is what the layouts' comparison shows."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(4, 9, bias=False, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (1,))
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    assert is_divided(head)
    logits_SV = torch.randn(5, 9, dtype=torch.float64, generator=generator).requires_grad_()
    targets_S = torch.randint(9, (5,), generator=generator)

    logprobs_S, entropy_S = divided_scores(head, logits_SV * 1.0, targets_S)

    expected = torch.distributions.Categorical(logits=logits_SV)
    assert torch.allclose(logprobs_S, expected.log_prob(targets_S))
    assert torch.allclose(entropy_S, expected.entropy())
    assert torch.autograd.gradcheck(lambda logits: divided_scores(head, logits, targets_S), (logits_SV,))
