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


def test_a_step_of_every_dimension_has_one_order_of_collectives_in_each_group_and_the_memory_estimated() -> None:
    """With a critic and a reference, and of the policy alone. ``make nightly`` traces a model of 72B in each layout."""
    layouts = ["policy alone", "pipeline, tensor, replicas"]
    command = [sys.executable, "-m", "tools.trace_layouts", "--layers", "2", "--layouts", *layouts]

    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    alone, divided = (line for line in ended.stdout.splitlines() if ": 64 ranks, " in line)
    assert "dp_shard 64: 2 traced, " in alone
    assert "% of the estimate" in alone
    assert "pp 2 x dp_replicate 4 x dp_shard 4 x tp 2: 6 traced, " in divided
    assert "one order" in alone
    assert "one order" in divided


def test_another_order_another_size_and_what_nobody_receives_are_found() -> None:
    larger = replace(GATHER, sizes=(((8,), "torch.float32"),))
    elsewhere = replace(GATHER, members=(0, 2))

    for ours, theirs in (
        ([GATHER, REDUCE], [REDUCE, GATHER]), ([GATHER], [larger]), ([GATHER, REDUCE], [GATHER]),
        ([SENT, SENT], [RECEIVED]),
    ):  # fmt: skip
        assert len(list(disagreements({0: ours, 1: theirs}))) == 1
    assert list(disagreements({0: [GATHER, elsewhere, SENT, REDUCE], 1: [RECEIVED, GATHER, REDUCE]})) == []


def test_both_ends_of_each_dimension_and_the_middle_of_a_pipeline_are_traced() -> None:
    assert ranks_to_trace((1, 1, 64, 1)) == [0, 63]
    assert ranks_to_trace((3, 1, 3, 2)) == [0, 1, 4, 6, 12, 17]
