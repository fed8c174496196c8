"""What each of two ranks does, of which the second fails while a thread of it is in a collective that nobody joins."""

import asyncio
import os
import sys
import threading
from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel
import torch.distributed as dist

import areal_async.__main__ as command_line
from areal_async.errors import PipelineError
from areal_async.process.stdio import say
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.threads import EngineThread


def be_a_rank(environment: Mapping[str, str], log: str) -> None:
    """Run a command as a rank that a launcher has started."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    os.environ.update(environment)
    command_line.main = _main
    sys.exit(command_line.command())


def _main(arguments: Sequence[str]) -> int:
    """Do what the verb would, and tell its error as it is told."""
    try:
        with joined_ranks(deadline_s=600.0) as ranks:
            anyio.run(_train, ranks)
    except PipelineError as exc:
        say(f"still joined: {dist.is_initialized()}")
        say(str(exc))
        return 1
    return 0


async def _train(ranks: Ranks) -> None:
    if ranks.rank == 0:
        ranks.all_agree(True)
        threading.Event().wait()  # hears as little of its peers as nccl does
    ranks.all_agree(True)
    thread = EngineThread(ranks.device)
    asyncio.ensure_future(thread.run(lambda: ranks.sums([1.0])))
    await anyio.lowlevel.checkpoint()
    raise PipelineError("no room")
