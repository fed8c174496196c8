"""Two ranks do what one would: the same words on both, the same step, and files that one rank alone can load."""

import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_async.process.host import LOOPBACK, free_port
from areal_async.protocol.types import TensorSpec, UpdateGroup
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks, is_of_peers
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.one_of_two_failing import be_a_rank
from tests.unit.trainer.one_of_two_leaving import meet, miss_a_peer
from tests.unit.trainer.one_of_two_ranks import interface_of_gloo, speak_and_train
from tests.unit.trainer.rank_workers import DEADLINE_S, RankWorkers, forked
from tests.unit.trainer.receivers import Receiver, are_equal
from tools.bench_lengths import divide_shares
from tools.compare_ranks import compare, parser

pytestmark = pytest.mark.timeout(300)
"""Processes that import torch take their time on a busy machine."""


class Pair(NamedTuple):
    """What two ranks left behind."""

    directory: Path
    words: list[dict[str, Any]]
    """What each of them saw."""
    received: dict[str, Tensor]
    """What a server got of their broadcast."""


@pytest.fixture(scope="module")
def pair(model: Path, two_ranks: RankWorkers, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("pair")
    receiver = Receiver("0-0")
    is_over = threading.Event()

    def play() -> None:
        while not (directory / "announced.json").exists():
            if is_over.wait(0.05):
                return
        group = msgspec.json.decode((directory / "announced.json").read_bytes(), type=UpdateGroup)
        buckets = msgspec.json.decode((directory / "buckets.json").read_bytes(), type=list[list[TensorSpec]])
        receiver.receive(group, buckets)
        receiver.finish()

    player = threading.Thread(target=play)
    player.start()
    try:
        words = two_ranks.run(speak_and_train, model, directory)
    finally:
        is_over.set()
        player.join()
        receiver.leave()
    return Pair(directory, words, receiver.tensors)


def test_bytes_and_votes_reach_both_ranks(pair: Pair) -> None:
    for words in pair.words:
        assert bytes.fromhex(words["broadcast"]) == b"\x00from the first\xff"
        assert words["empty"] == ""
        assert [bytes.fromhex(part) for part in words["gather"]] == [b"", b"abc"]
        assert (words["all_true"], words["one_false"]) == (True, False)


def test_two_ranks_report_and_save_what_one_would(pair: Pair, model: Path, ranks: Ranks) -> None:
    directory, (first, second), _ = pair
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
    start, saved = load_file(model / "model.safetensors"), load_file(directory / "weights" / "model.safetensors")
    for name, value in alone.full_parameters().items():
        expected = value - start[name]
        assert torch.linalg.norm(saved[name] - start[name] - expected) <= 1e-3 * torch.linalg.norm(expected)


def test_a_checkpoint_of_two_ranks_loads_on_one(pair: Pair, model: Path, ranks: Ranks) -> None:
    directory, words, _ = pair
    engine = engine_of(model, ranks)

    assert Engines(actor=engine).load_checkpoint(directory / "checkpoint") == b"ledger"

    assert [one["ledger"] for one in words] == ["ledger", "ledger"]
    saved = load_file(directory / "weights" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in engine.full_parameters().items())
    # The optimizer's averages came along: a resumed step moves on from them, a fresh one would start anew.
    resumed = engine.train_step(random_rows(7), step=2, total_steps=2)
    assert resumed.num_updates == 1


def test_a_checkpoint_of_two_ranks_is_written_while_they_train_and_talk(pair: Pair) -> None:
    assert [words["beside"] for words in pair.words] == [["step 3", "step 4"]] * 2


def test_every_rank_learns_that_a_checkpoint_could_not_be_written(pair: Pair) -> None:
    first, second = (words["refused"] for words in pair.words)

    assert "config.json/1-1 could not be written: NotADirectoryError" in first
    assert "config.json/1-1 could not be written: another rank says why" in second


def test_ranks_without_rows_give_no_logprobs_and_keep_step(pair: Pair) -> None:
    assert [words["num_logprobs"] for words in pair.words] == [1, 0]


def test_ranks_make_as_many_rows_and_choose_together_how_they_are_filled(pair: Pair) -> None:
    first, second = pair.words

    # Even rows on the first would meet a full one and a short one on the second: 10 + 6 against 10 + 2.
    assert (first["uneven"], second["uneven"]) == ([[5, 5], [1, 1]], [[10], [2]])
    # Here the second's rows are even: 6 + 6 against 10 + 6.
    assert (first["even"], second["even"]) == ([[5, 1], [5, 1]], [[6], [6]])
    # The same without processes, as the benchmark works it out.
    for name, other in (("uneven", [10, 2]), ("even", [6, 6])):
        lengths = [[5, 5, 1, 1], other]
        parts = divide_shares(lengths, lengths, token_budget=10)
        rows = [[[own[i] for i in row] for row in part] for own, part in zip(lengths, parts, strict=True)]
        assert rows == [first[name], second[name]]


def test_a_rank_alone_hears_itself(ranks: Ranks) -> None:
    assert ranks.broadcast_bytes(b"word") == b"word"
    assert ranks.gather_bytes(b"word") == [b"word"]
    assert ranks.all_agree(True)
    assert not ranks.all_agree(False)
    with pytest.raises(ValueError, match="got None on rank 0"):
        ranks.broadcast_bytes(None)


def test_two_ranks_send_what_they_hold_together(pair: Pair) -> None:
    assert are_equal(pair.received, load_file(pair.directory / "sent" / "model.safetensors"))


def test_the_comparison_tool_starts_ranks_of_its_own_and_finds_them_in_agreement(
    model: Path, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """One, which takes half as long: that two agree is shown above."""
    arguments = parser().parse_args(["--model", str(model), "--ranks", "1", "--sequences", "7", "--max-tokens", "24"])

    status = compare(arguments, ranks)

    assert "1 and 1 ranks agree" in capfd.readouterr().out
    assert status == 0


def test_who_misses_a_peer_knows_that_it_is_no_fault_of_what_it_trains() -> None:
    with RankWorkers(2) as workers:
        first, _ = workers.run(miss_a_peer)

    assert first
    assert not is_of_peers(RuntimeError("index out of range in self"))
    assert not is_of_peers(ExceptionGroup("calls", [ValueError("of gloo")]))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo is left to itself")
def test_ranks_listen_where_the_first_is_reached(two_ranks: RankWorkers) -> None:
    """And not at what the name of their host resolves to."""
    assert two_ranks.run(interface_of_gloo) == ["lo", "lo"]


def test_a_rank_that_fails_ends_though_a_thread_of_it_is_in_a_collective_and_its_peer_hears_nothing(
    tmp_path: Path,
) -> None:
    """So that the launcher, who sees the end of a process, ends the others. The peer is as deaf as nccl's would be."""
    log = tmp_path / "ranks.log"
    log.touch()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    deaf, failing = (
        forked.Process(target=be_a_rank, args=(shared | {"RANK": rank, "LOCAL_RANK": rank}, str(log)), daemon=True)
        for rank in "01"
    )
    deaf.start()
    failing.start()
    try:
        failing.join(DEADLINE_S)
        assert (failing.exitcode, deaf.exitcode) == (1, None), log.read_text()
    finally:
        for process in (deaf, failing):
            process.kill()
            process.join()
    assert log.read_text().splitlines()[-2:] == ["still joined: True", "no room"]


def test_a_rank_of_an_older_start_meets_nobody_of_a_newer_one_at_the_same_port() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    pipes, processes = [], []
    for start, rank in (("older", "1"), ("newer", "0"), ("newer", "1")):
        ours, theirs = forked.Pipe()
        environment = shared | {"RENDEZVOUS_ID": start, "RANK": rank}
        processes.append(forked.Process(target=meet, args=(environment, theirs), daemon=True))
        pipes.append(ours)
    older, first, second = pipes
    try:
        for process, pipe in zip(processes[:2], pipes[:2], strict=True):
            process.start()
            assert pipe.recv() == "comes"
        assert not first.poll(6.0), "the first of the newer start has met the older start's second"
        processes[2].start()
        assert second.recv() == "comes"
        for pipe in (first, second):
            assert pipe.poll(DEADLINE_S)
            assert pipe.recv() == b"newer"
        assert not older.poll(0)
    finally:
        for process in (one for one in processes if one.pid is not None):
            process.kill()
            process.join()
