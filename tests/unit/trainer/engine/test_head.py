"""The head's gradient is as exact in chunks as in one piece."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_async.trainer.engine import head
from areal_async.trainer.engine.head import weight_of_chunks
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import pack_rows, unsampled_row
from tests.unit.trainer.head_gradients import head_errors
from tests.unit.trainer.models import save_model
from tests.unit.trainer.rank_workers import RankWorkers

pytestmark = pytest.mark.timeout(300)
"""Processes that import torch take their time on a busy machine."""


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose head is its own, with words that two ranks share evenly."""
    return save_model(tmp_path_factory.mktemp("untied"), tied=False, vocab_size=64)


def test_chunks_add_no_error_to_a_bfloat16_head(untied: Path, ranks: Ranks) -> None:
    errors = head_errors(ranks, untied)

    assert errors["chunked"] <= 1.5 * errors["whole"]


def test_chunks_add_no_error_where_ranks_share_the_words(untied: Path, two_ranks: RankWorkers) -> None:
    for errors in two_ranks.run(head_errors, untied):
        assert errors["chunked"] <= 1.5 * errors["whole"]


def test_a_second_backward_pass_has_the_gradient_of_the_first() -> None:
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    first, second = weight_of_chunks(weight, 2)
    loss = (first + 2 * second).sum()

    loss.backward(retain_graph=True)
    once = weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()

    assert once.tolist() == [3.0] * 3
    assert weight.grad.tolist() == [6.0] * 3  # type: ignore[union-attr]


def test_a_chunks_gradient_is_summed_before_the_next_one_is_there(
    untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is as large as the weight."""
    from transformers import AutoModelForCausalLM

    decoder = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16)
    row = pack_rows([unsampled_row([1] * 13, [False] + [True] * 12)], torch.device("cpu"))
    monkeypatch.setattr("areal_async.trainer.engine.model.HEAD_CHUNK_ELEMENTS", 4 * 64)
    logprobs_S, _ = PolicyModel(decoder).read(torch.ones(13, decoder.config.hidden_size, dtype=torch.bfloat16), row)
    order: list[str] = []
    add = head._Total.add

    def noted(total: head._Total, gradient: Tensor) -> Tensor | None:
        order.append("summed")
        return add(total, gradient)

    monkeypatch.setattr(head._Total, "add", noted)
    decoder.lm_head.register_forward_pre_hook(lambda *_: order.append("made again"))

    logprobs_S.sum().backward()

    assert order == ["made again", "summed"] * 3
