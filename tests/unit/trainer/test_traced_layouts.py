"""Ranks of one group make its collectives in one order, at numbers of ranks that no machine here has."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.trace_layouts import CollectiveCall, disagreements, ranks_to_trace

pytestmark = pytest.mark.timeout(300)
"""A process that imports torch takes its time on a busy machine."""

GATHER = CollectiveCall(name="_allgather_base_", members=(0, 1), peer=None, sizes=(((4,), "torch.float32"),))
REDUCE = replace(GATHER, name="_reduce_scatter_base_")
SENT = replace(GATHER, name="send", peer=1)
RECEIVED = replace(GATHER, name="recv_", peer=0)


def test_a_step_of_every_dimension_has_one_order_of_collectives_in_each_group() -> None:
    """With a critic and a reference. ``make nightly`` traces every layout, with 80 layers, at 64 and 1,024 ranks."""
    command = [sys.executable, "-m", "tools.trace_layouts", "--layers", "2", "--layouts", "pipeline, tensor, replicas"]

    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "pp 2 x dp_replicate 4 x dp_shard 4 x tp 2: 8 traced, " in ended.stdout
    assert "one order" in ended.stdout


def test_another_order_another_size_and_what_nobody_receives_are_found() -> None:
    larger = replace(GATHER, sizes=(((8,), "torch.float32"),))
    elsewhere = replace(GATHER, members=(0, 2))

    for ours, theirs in (
        ([GATHER, REDUCE], [REDUCE, GATHER]), ([GATHER], [larger]), ([GATHER, REDUCE], [GATHER]),
        ([SENT, SENT], [RECEIVED]),
    ):  # fmt: skip
        assert len(list(disagreements({0: ours, 1: theirs}))) == 1
    assert list(disagreements({0: [GATHER, elsewhere, SENT, REDUCE], 1: [RECEIVED, GATHER, REDUCE]})) == []


def test_the_first_the_middle_and_the_last_rank_of_each_dimension_are_traced() -> None:
    assert ranks_to_trace((1, 1, 64, 1)) == [0, 32, 63]
    assert ranks_to_trace((2, 1, 3, 2)) == [0, 1, 2, 4, 6, 11]
