"""The trainer's benchmark compares like with like, and packing wastes little of what it packs."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.flops import DecoderFlops
from tools import bench_trainer
from tools.bench_lengths import KINDS, LONGEST_TOKENS, draw, packed
from tools.bench_trainer_ours import _packed, _plain, of_mean_length, read_rows, settings_of
from tools.bench_trainer_trl import _places, rows_at_once
from tools.rounds import Contender

MODEL = "configs/models/tiny"
FLOPS = DecoderFlops(per_token=1_700_000, per_scored_token=130_000, per_pair=2048)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


Lengths = Callable[..., list[int]]


@pytest.fixture(scope="module")
def lengths_of(tokenizer: Any) -> Lengths:
    """Return the lengths of a batch's sequences, drawn once for all tests."""

    @functools.cache
    def lengths(kind: str, *, groups: int, seed: int) -> list[int]:
        drawn = draw(kind, tokenizer, groups=groups, group_size=8, seed=seed)
        return [length for one in drawn for length in one.lengths]

    return lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_packing_wastes_under_five_percent_of_the_budget_on_any_number_of_ranks(
    kind: str, num_ranks: int, lengths_of: Lengths
) -> None:
    for seed in range(2 if num_ranks == 1 else 1):
        lengths = lengths_of(kind, groups=128 * num_ranks, seed=seed)
        for token_budget in (1024, 2048):
            division = packed(lengths, token_budget=token_budget, num_ranks=num_ranks, flops=FLOPS)

            assert division.waste < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_a_batch_small_for_its_ranks_takes_at_most_one_more_row_on_each(
    kind: str, num_ranks: int, lengths_of: Lengths
) -> None:
    lengths = lengths_of(kind, groups=128, seed=1)

    division = packed(lengths, token_budget=2048, num_ranks=num_ranks, flops=FLOPS)

    assert division.num_rows <= division.fewest_rows + num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_ranks_wait_for_each_other_under_one_percent_of_their_time(num_ranks: int, lengths_of: Lengths) -> None:
    for kind in KINDS:
        lengths = lengths_of(kind, groups=128, seed=1)

        assert packed(lengths, token_budget=2048, num_ranks=num_ranks, flops=FLOPS).idle < 0.01


def test_heavy_tailed_lengths_are(tokenizer: Any) -> None:
    drawn = draw("heavy", tokenizer, groups=128, group_size=8, seed=1)
    answers = sorted(length for one in drawn for length in one.answer_lengths)

    assert answers[-1] == LONGEST_TOKENS
    assert answers[-1] > 10 * np.mean(answers) > 10 * answers[len(answers) // 2]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "batch.npz"
    options = ["--groups", "4", "--group-size", "4", "--model", MODEL]
    bench_trainer.write_batch(path, "heavy", bench_trainer._parser().parse_args(options))
    return path


def test_packed_and_padded_come_to_one_gradient(batch: Path, ranks: Ranks) -> None:
    rows, settings = read_rows(batch), settings_of(MODEL, 1024)

    assert _packed(settings, rows, ranks)() == pytest.approx(_plain(settings, rows)(), rel=1e-4)


def test_the_dense_batch_has_as_many_rows_and_about_as_many_tokens_and_no_padding(batch: Path) -> None:
    rows = read_rows(batch)

    dense = of_mean_length(rows)

    assert len(dense) == len(rows)
    assert len({row.num_tokens for row in dense}) == 1
    for count in (lambda row: row.num_tokens, lambda row: int(row.loss_mask.sum())):
        assert sum(map(count, dense)) == pytest.approx(sum(map(count, rows)), abs=len(rows))


def test_the_recorded_advantages_are_of_each_group(batch: Path) -> None:
    with np.load(batch) as arrays:
        rewards = torch.from_numpy(arrays["rewards"]).view(4, 4)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        assert np.allclose(arrays["advantages"], expected.numpy().ravel())


def test_trl_takes_as_many_padded_rows_at_once_as_the_budget_holds() -> None:
    assert rows_at_once(256, 480, 4096) == 8
    assert rows_at_once(12, 100, 650) == 6
    assert rows_at_once(12, 5000, 4096) == 1
    assert _places(["1", "1", "0", "0"], 2) == [2, 3, 0, 1]


def contender(program: str, *, deadline_s: float = 100.0) -> Contender:
    return Contender([sys.executable, "-c", program], niceness=0, threads=1, deadline_s=deadline_s)


def test_contenders_play_a_round_for_each_call_and_report_their_memory() -> None:
    player = contender(
        "from tools.rounds import Stage\n"
        "stage = Stage()\n"
        "print('what a library prints')\n"
        "while stage.wait():\n"
        "    held = bytearray(64 << 20)\n"
        "    stage.report({'num_tokens': 7})\n"
    )
    try:
        rounds = [player.play(), player.play()]
    finally:
        player.close()

    assert [one["num_tokens"] for one in rounds] == [7, 7]
    assert rounds[1]["peak_bytes"] > rounds[1]["added_bytes"] > 60 << 20


def test_a_contender_that_ends_or_hangs_ends_the_benchmark_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match="no such model"):
        contender("raise SystemExit('no such model')")
    with pytest.raises(SystemExit, match=r"took more than 0.5 s"):
        contender("import time; time.sleep(60)", deadline_s=0.5)
