"""However ranks divide a model, it learns what it would on one, and its checkpoints load in any other layout."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows, save_model
from tests.unit.trainer.one_of_four_ranks import train_and_count
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.trained_steps import NUM_STEPS, TrainedSteps, batch_rows
from tools.compare_layouts import compare, parser, train_layouts

pytestmark = pytest.mark.timeout(300)
"""Processes that import torch take their time on a busy machine."""

PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "num_minibatches": 2}


def test_copies_and_divided_matrices_have_the_gradients_of_one_rank(
    ranks: Ranks, two_ranks: RankWorkers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of every parameter in three steps, and its change over them; policy and critic, biases and an untied head."""
    model = save_model(tmp_path / "qwen2", family="qwen2", tied=False, vocab_size=66)
    given = ["--model", str(model), "--layouts", "replicas,tensor", "--sequences", "7", "--max-tokens", "24"]

    def launch(arguments: Namespace, num_ranks: int, output: Path) -> None:
        assert num_ranks == 2
        two_ranks.run(train_layouts, arguments, output)

    status = compare(parser().parse_args([*given, "--critic"]), ranks, launch=launch)

    output = capfd.readouterr().out
    assert "all layouts agree with one rank" in output
    assert [line.split()[:2] for line in output.splitlines()[1:-1]] == [
        [role, layout] for layout in ("replicas", "tensor") for role in ("policy", "critic")
    ]
    assert status == 0


@pytest.fixture(scope="module")
def four(
    ranks: Ranks, four_ranks: RankWorkers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Return a model, the folder that four ranks worked in, and what each of them saw."""
    directory = tmp_path_factory.mktemp("four")
    # Two parts share its words evenly, and then two ranks unevenly.
    model = save_model(directory / "model", vocab_size=62)
    first = TrainedSteps(model, ranks, **PPO)
    first.train(batch_rows(), step=1)
    first.engines.save_checkpoint(directory / "of_one", b"of one")
    (directory / "of_one.json").write_text(json.dumps(first.fingerprint()))
    return model, directory, four_ranks.run(train_and_count, model, PPO, directory)


def test_models_of_other_layouts_than_the_policy_learn_as_on_one_rank(
    four: tuple[Path, Path, list[dict[str, Any]]], ranks: Ranks
) -> None:
    model, _, seen = four
    alone = TrainedSteps(model, ranks, **PPO)

    stats = [alone.train(batch_rows(), step=step) for step in range(1, NUM_STEPS + 1)]

    assert all(one["stats"] == seen[0]["stats"] for one in seen)
    for together, one in zip(seen[0]["stats"], stats, strict=True):
        assert together == pytest.approx(one, rel=1e-3, abs=1e-5)
    assert seen[0]["fingerprint"] == pytest.approx(alone.fingerprint(), rel=1e-5, abs=1e-6)
    assert stats[1]["kl_mean"] > 0  # the reference had something to say


def test_checkpoints_load_in_another_layout(four: tuple[Path, Path, list[dict[str, Any]]], ranks: Ranks) -> None:
    model, directory, seen = four
    resumed = TrainedSteps(model, ranks, **PPO)

    assert resumed.engines.load_checkpoint(directory / "of_four") == b"of four"

    assert resumed.fingerprint() == pytest.approx(seen[0]["fingerprint"], rel=1e-6)
    assert [one["ledger"] for one in seen] == ["of one"] * 4
    assert seen[0]["loaded"] == pytest.approx(json.loads((directory / "of_one.json").read_text()), rel=1e-6)


def test_compressed_gradients_cross_the_ranks_in_half_the_bytes(
    four: tuple[Path, Path, list[dict[str, Any]]],
) -> None:
    for one in four[2]:
        exact, compressed = one["exact"], one["compressed"]
        assert (exact["dtypes"], compressed["dtypes"]) == ({"torch.float32"}, {"torch.bfloat16"})
        assert 0 < abs(compressed["grad_norm"] / exact["grad_norm"] - 1) < 1e-2


def test_shards_in_the_memory_of_the_host_train_alike(model: Path, ranks: Ranks) -> None:
    """Without a GPU that is where they lie anyway: this shows that every step of the way takes them."""
    engines = [engine_of(model, ranks, cpu_offload=offload) for offload in (False, True)]

    stats = [engine.train_step(random_rows(5), step=1, total_steps=1) for engine in engines]

    assert stats[0] == stats[1]
    assert parameters_differ(*engines) == 0
