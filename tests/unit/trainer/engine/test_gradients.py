"""Between two rows a rank keeps the gradients of its own shard, and no others: 4 bytes for each of its parameters."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.living_gradients import SPARE_BYTES, Seen, train_in_layouts
from tests.unit.trainer.models import save_model
from tests.unit.trainer.rank_workers import RankWorkers

pytestmark = pytest.mark.timeout(300)
"""Processes that import torch take their time on a busy machine."""

LORA: dict[str, Any] = {"lora": {"rank": 4}}
RECOMPUTED = {"activation_checkpointing": True}
OF_TWO: dict[str, dict[str, Any]] = {
    "sharded": {},
    "critic": {},
    "lora": LORA,
    "recomputed": RECOMPUTED,
    "copies": {"replicas": 2},
    "parts": {"tensor_parallel": 2},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "sharded": {},
    "copies": {"replicas": 2},
    "stages": {"pipeline_parallel": 2},
    "staged copies": {"pipeline_parallel": 2, "replicas": 2},
}


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy whose every parameter four ranks can share evenly; its embedding is its head too."""
    return save_model(tmp_path_factory.mktemp("even"), vocab_size=64)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one with a head of its own."""
    return save_model(tmp_path_factory.mktemp("untied"), vocab_size=64, tied=False)


def test_one_rank_keeps_its_gradients_once(even: Path, untied: Path, ranks: Ranks) -> None:
    layouts = {"sharded": {}, "critic": {}, "lora": LORA, "recomputed": RECOMPUTED}
    for model in (even, untied):
        for seen in train_in_layouts(ranks, model, layouts).values():
            _hold(seen, ranks_per_copy=1)


def test_two_ranks_keep_the_gradients_of_their_shards_after_every_row(
    even: Path, untied: Path, two_ranks: RankWorkers
) -> None:
    tied, own_head = two_ranks.run(train_in_layouts, even, OF_TWO), two_ranks.run(train_in_layouts, untied, {"own": {}})
    for seen in map(dict.__or__, tied, own_head):
        for name in ("sharded", "critic", "lora", "recomputed", "own"):
            _hold(seen[name], ranks_per_copy=2)
            assert seen[name].num_scattered == seen[name].num_rows * seen[name].num_units
            assert not seen[name].num_shared
        _hold(seen["copies"], ranks_per_copy=1)
        assert seen["copies"].num_shared == seen["copies"].num_units  # once, with the last row
        assert max(seen["parts"].alive_bytes) <= seen["parts"].shard_bytes + SPARE_BYTES


def test_four_ranks_keep_the_gradients_of_their_shards_after_every_row(even: Path, four_ranks: RankWorkers) -> None:
    for seen in four_ranks.run(train_in_layouts, even, OF_FOUR):
        _hold(seen["sharded"], ranks_per_copy=4)
        _hold(seen["copies"], ranks_per_copy=2)
        assert seen["copies"].num_scattered == seen["copies"].num_rows * seen["copies"].num_units
        assert seen["copies"].num_shared == seen["copies"].num_units
        # Of two layers and what is around them, each stage has one layer and its end.
        assert seen["stages"].num_scattered == 2 * seen["stages"].num_rows
        assert seen["staged copies"].num_shared == 2
        assert max(seen["stages"].alive_bytes) <= seen["stages"].shard_bytes + SPARE_BYTES


def _hold(seen: Seen, *, ranks_per_copy: int) -> None:
    assert seen.num_rows > 3
    assert len(seen.alive_bytes) == seen.num_rows
    assert max(seen.alive_bytes) <= 4 * seen.num_parameters / ranks_per_copy + SPARE_BYTES
