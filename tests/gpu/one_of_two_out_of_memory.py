"""One of two ranks, of which the second runs out of memory while the first waits for it in a collective."""

import sys
from collections.abc import Sequence

import torch

import areal_async.__main__ as command_line
from areal_async.trainer.engine.parallel.ranks import joined_ranks

TOO_MUCH = 1 << 50
"""Bytes that no machine has."""


def main(arguments: Sequence[str]) -> int:
    """Meet once, so that the group is whole, and then never again."""
    with joined_ranks(deadline_s=600.0) as ranks:
        ranks.sums([1.0])
        if ranks.rank == 1:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=ranks.device)
        ranks.sums([1.0])
    return 0


if __name__ == "__main__":
    command_line.main = main  # ends as a rank of the trainer does
    sys.exit(command_line.command())
