"""Two ranks do what one would: the same words on both, the same step, and files that one rank alone can load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_async.trainer.distributed import Ranks
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.processes import run_on_ranks
from tools.compare_ranks import compare, parser

pytestmark = pytest.mark.timeout(180)
"""Processes that import torch take their time on a busy machine."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the directory that two ranks wrote to, and what each of them saw."""
    directory = tmp_path_factory.mktemp("pair")
    printed = run_on_ranks(2, "tests.unit.trainer.one_of_two_ranks", str(model), str(directory))
    return directory, [json.loads(output) for output in printed]


def test_bytes_and_votes_reach_both_ranks(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    for words in pair[1]:
        assert bytes.fromhex(words["broadcast"]) == b"\x00from the first\xff"
        assert words["empty"] == ""
        assert [bytes.fromhex(part) for part in words["gather"]] == [b"", b"abc"]
        assert (words["all_true"], words["one_false"]) == (True, False)


def test_two_ranks_report_and_save_what_one_would(
    pair: tuple[Path, list[dict[str, Any]]], model: Path, ranks: Ranks
) -> None:
    directory, (first, second) = pair
    alone = engine_of(model, ranks)
    stats = [alone.train_step(random_rows(7), step=step, total_steps=2) for step in (1, 2)]

    assert first["stats"] == second["stats"]
    assert first["hashes"] == second["hashes"]
    for seen, expected in zip(first["stats"], stats, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy_mean",
            "logprob_gap_mean",
            "ratio_max_deviation",
            "num_tokens",
            "lr",
        ):
            assert seen[name] == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-5)
    saved = load_file(directory / "weights" / "model.safetensors")
    for name, value in alone.full_parameters().items():
        assert torch.allclose(saved[name], value, atol=1e-4)


def test_a_checkpoint_of_two_ranks_loads_on_one(
    pair: tuple[Path, list[dict[str, Any]]], model: Path, ranks: Ranks
) -> None:
    directory, words = pair
    engine = engine_of(model, ranks)

    assert engine.load_checkpoint(directory / "checkpoint") == b"ledger"

    assert [one["ledger"] for one in words] == ["ledger", "ledger"]
    saved = load_file(directory / "weights" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in engine.full_parameters().items())
    # The optimizer's averages came along: a resumed step moves on from them, a fresh one would start anew.
    resumed = engine.train_step(random_rows(7), step=2, total_steps=2)
    assert resumed.num_updates == 1


def test_ranks_without_rows_give_no_logprobs_and_keep_step(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [words["num_logprobs"] for words in pair[1]] == [1, 0]


def test_a_rank_alone_hears_itself(ranks: Ranks) -> None:
    assert ranks.broadcast_bytes(b"word") == b"word"
    assert ranks.gather_bytes(b"word") == [b"word"]
    assert ranks.all_agree(True)
    assert not ranks.all_agree(False)
    with pytest.raises(ValueError, match="got None on rank 0"):
        ranks.broadcast_bytes(None)


def test_the_comparison_tool_finds_one_and_two_ranks_in_agreement(
    model: Path, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = parser().parse_args(["--model", str(model), "--sequences", "7", "--max-tokens", "24"])

    status = compare(arguments, ranks)

    assert "1 and 2 ranks agree" in capfd.readouterr().out
    assert status == 0
