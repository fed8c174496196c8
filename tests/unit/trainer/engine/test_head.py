"""The head's gradient is as exact in chunks as in one piece."""

from pathlib import Path

import pytest
import torch

from areal_async.trainer.engine.head import weight_of_chunks
from areal_async.trainer.engine.parallel.ranks import Ranks
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
