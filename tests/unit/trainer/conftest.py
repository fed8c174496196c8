"""Trainers of several ranks, and a small model, made once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.trainer.models import save_model
from tests.unit.trainer.rank_workers import RankWorkers


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankWorkers]:
    """Return two processes that are the ranks of a trainer."""
    with RankWorkers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankWorkers]:
    """Return four processes that are the ranks of a trainer."""
    with RankWorkers(4) as workers:
        yield workers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Qwen3 with tied embeddings."""
    return save_model(tmp_path_factory.mktemp("model"))
