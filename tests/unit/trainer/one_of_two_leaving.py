"""One of two ranks: the second leaves, and the first says of what its collective raised whether that was a peer's."""

import os

import torch
import torch.distributed as dist

from areal_async.trainer.engine.parallel.ranks import is_of_peers, join_ranks


def main() -> None:
    ranks = join_ranks(deadline_s=60.0)
    ranks.barrier()
    if ranks.rank == 1:
        os._exit(0)
    try:
        ranks.reduce(torch.zeros(4), dist.ReduceOp.SUM)
    except RuntimeError as exc:
        print(is_of_peers(ExceptionGroup("calls", [exc])), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
