"""A model whose layers lie on several ranks trains as on one: four ranks as four stages, and as two by two."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.division import divide
from areal_async.trainer.engine.parallel.execution import num_microbatches
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.flops import DecoderFlops
from tests.unit.trainer import one_of_a_pipeline as one
from tests.unit.trainer.models import engine_of, random_rows, save_model
from tests.unit.trainer.rank_workers import RankWorkers
from tools.bench_pipeline import bubble

Seen = dict[str, dict[str, NDArray[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for a model and what comes of it."""
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def deep(folder: Path) -> Path:
    """Return the folder of a decoder of four layers and tied embeddings."""
    return save_model(folder / "model", num_layers=4)


@pytest.fixture(scope="module")
def seen(ranks: Ranks, four_ranks: RankWorkers, folder: Path, deep: Path) -> Seen:
    """Return by layout what rank 0 of four wrote, where one rank had saved a checkpoint before."""
    engine = engine_of(deep, ranks)
    one.train(engine, 1)
    Engines(actor=engine).save_checkpoint(folder / "saved_on_one", b"one")
    four_ranks.run(one.train_in_stages, deep, folder)
    return {name: dict(np.load(folder / f"{name}.npz")) for name in one.LAYOUTS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", one.LAYOUTS)
def test_gradients_in_stages_equal_those_of_a_whole_model(layout: str, seen: Seen, deep: Path, ranks: Ranks) -> None:
    """Unclipped, and every parameter's: the two copies of a tied embedding make one gradient."""
    _assert_close(_part(seen[layout], "gradient"), one.gradients(deep, ranks), relative=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", one.LAYOUTS)
def test_changes_of_three_steps_in_stages_equal_those_of_a_whole_model(
    layout: str, seen: Seen, deep: Path, ranks: Ranks
) -> None:
    """With an entropy bonus, a threshold over a mini-batch, ratios of sequences; what is reported is equal too."""
    start = one.arrays(engine_of(deep, ranks).full_parameters())
    _, alone = one.run(deep, ranks, one.ALGORITHMS[layout])
    _assert_close({name: seen[layout][name] for name in alone}, alone, relative=1e-3, start=start)


@pytest.mark.timeout(300)
def test_critic_and_reference_in_stages_say_what_whole_ones_do(seen: Seen, deep: Path, ranks: Ranks) -> None:
    _assert_close(_part(seen["four_stages"], "others"), one.others(deep, ranks), relative=1e-4)


@pytest.mark.timeout(300)
def test_fewer_rows_than_stages_are_trained_and_none_are_too(seen: Seen, deep: Path, ranks: Ranks) -> None:
    _assert_close(_part(seen["four_stages"], "few"), one.few_rows(deep, ranks), relative=1e-4)


@pytest.mark.timeout(300)
def test_pipeline_goes_on_from_the_checkpoint_of_one_rank(seen: Seen, folder: Path, deep: Path, ranks: Ranks) -> None:
    engine = engine_of(deep, ranks)
    assert Engines(actor=engine).load_checkpoint(folder / "saved_on_one") == b"one"

    logprobs = torch.cat(engine.logprobs(one.batch_rows())).numpy()
    np.testing.assert_allclose(seen["interleaved"]["logprobs"], logprobs, rtol=0, atol=1e-5)
    _assert_close(_part(seen["interleaved"], "next"), one.train(engine, 1), relative=1e-3)


@pytest.mark.timeout(300)
def test_one_rank_goes_on_from_the_checkpoint_of_a_pipeline(seen: Seen, folder: Path, deep: Path, ranks: Ranks) -> None:
    engine = engine_of(deep, ranks, algorithm=one.ALGORITHMS["two_by_two"], max_grad_norm=1e-2, lr=1e-3)
    assert Engines(actor=engine).load_checkpoint(folder / "saved_on_four") == b"four"

    _assert_close(_part(seen["two_by_two"], "next"), one.train(engine, 1), relative=1e-3)


@pytest.mark.timeout(300)
def test_weights_of_a_pipeline_are_a_plain_folder_with_tied_ones_once(seen: Seen, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder / "weights").state_dict()

    saved = {name: tensor for name, tensor in seen["two_by_two"].items() if name.startswith("model.")}
    assert "lm_head.weight" not in saved
    for name, tensor in saved.items():
        np.testing.assert_array_equal(loaded[name].numpy(), tensor)


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "is_interleaved", "expected"),
    [(1, 4, False, 4), (9, 4, False, 9), (1, 4, True, 4), (5, 2, True, 6), (10, 4, True, 10), (7, 3, True, 8)],
)
def test_rows_are_filled_up_to_what_a_schedule_takes(
    num_rows: int, num_ranks: int, is_interleaved: bool, expected: int
) -> None:
    assert num_microbatches(num_rows, num_ranks=num_ranks, is_interleaved=is_interleaved) == expected


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 0), (1, 4), (8, 4), (10, 5)])
def test_sequences_are_divided_into_a_row_for_each_rank_of_a_pipeline(
    num_rows: int, expected: int, ranks: Ranks
) -> None:
    """Where more are needed anyway, as many as those; without a sequence there is none."""
    flops = DecoderFlops(per_token=1, per_scored_token=0, per_pair=0)
    rows = [replace(random_rows(1)[0], index=index) for index in range(num_rows)]
    longest = 2 * rows[0].num_tokens if rows else 8

    parts = divide(rows, flops=flops, token_budget=longest, ranks=ranks, fit=lambda num_rows: max(num_rows, 4))

    assert len(parts) == expected
    assert sorted(index for part in parts for index in part) == list(range(num_rows))


def test_bubble_is_a_rank_fewer_in_microbatches_and_halved_by_two_stages_per_rank() -> None:
    assert bubble(6, num_ranks=4, stages_per_rank=1) == pytest.approx(3 / 9)
    assert bubble(6, num_ranks=4, stages_per_rank=2) == pytest.approx(1.5 / 7.5)


def _part(seen: Mapping[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    return {key.removeprefix(f"{name}."): value for key, value in seen.items() if key.startswith(f"{name}.")}


def _assert_close(
    together: Mapping[str, NDArray[Any]],
    alone: Mapping[str, NDArray[Any]],
    *,
    relative: float,
    start: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Compare each array's difference with its own largest entry, both from ``start`` on."""
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        zero = (start or {}).get(name, np.zeros_like(expected))
        largest = np.abs(expected - zero).max(initial=0.0)
        difference = np.abs(together[name] - expected).max(initial=0.0)
        assert difference <= relative * largest + 1e-12, f"{name}: {difference} of {largest}"
