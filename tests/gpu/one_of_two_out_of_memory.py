"""One of two ranks, of which the second runs out of memory while the first waits for it in a collective."""

import torch
import torch.distributed as dist

from areal_async.trainer.engine.parallel.ranks import joined_ranks

TOO_MUCH = 1 << 50
"""Bytes that no machine has."""


def main() -> None:
    """Meet once, so that the group is whole, and then never again."""
    with joined_ranks(deadline_s=600.0) as ranks:
        ranks.reduce(torch.ones(4, device=ranks.device), dist.ReduceOp.SUM)
        if ranks.rank == 1:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=ranks.device)
        ranks.reduce(torch.ones(4, device=ranks.device), dist.ReduceOp.SUM).tolist()


if __name__ == "__main__":
    main()
