"""What each of two ranks does, of which the second leaves."""

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from areal_async.trainer.engine.parallel.ranks import Ranks, is_of_peers, joined_ranks


def miss_a_peer(ranks: Ranks) -> bool:
    """Say on the first rank of what its collective raised whether that was a peer's."""
    ranks.all_agree(True)
    if ranks.rank == 1:
        os._exit(0)
    try:
        ranks.reduce(torch.zeros(4), dist.ReduceOp.SUM)
    except RuntimeError as exc:
        return is_of_peers(ExceptionGroup("calls", [exc]))
    return False


def meet(environment: Mapping[str, str], pipe: Connection) -> None:
    """Tell what the first rank says, once all have met."""
    os.environ.update(environment)
    pipe.send("comes")
    with joined_ranks(deadline_s=60.0) as ranks:
        pipe.send(ranks.broadcast_bytes(environment["RENDEZVOUS_ID"].encode() if ranks.rank == 0 else None))
