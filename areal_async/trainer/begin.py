"""Where a trainer begins: rank 0 chooses, the other ranks are told."""

import anyio
import msgspec

from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.restoring import choose_checkpoint, go_back
from areal_async.trainer.output.version_writer import WAITS_PER_DEADLINE

WAIT = b"wait"


class Begin(msgspec.Struct):
    """Message of rank 0 to the others before anything else."""

    lineage: int
    sequence: int
    """Stream sequence of the journal entry that begins the lineage, or gives up what followed its checkpoint."""
    checkpoint: str
    """Folder to restore from; empty for none."""


async def begin_lineage(lineage: Lineage) -> Begin:
    """Choose the checkpoint to begin from, as is ordered where the run is to go back, and begin; return where.

    Raises:
        UserError: no checkpoint is whole.
    """
    rollback = lineage.rollback
    refusal = "" if rollback is None else await go_back(lineage, rollback)
    if rollback is None or refusal:
        await choose_checkpoint(lineage)
    journal = await lineage.read_log()
    sequence = await lineage.write_begin()
    if rollback is not None and not refusal:
        sequence = await lineage.write_branch(journal)
    if rollback is not None:
        await lineage.end_rollback(rollback, refusal=refusal)
    path = lineage.checkpoint.path if lineage.checkpoint else ""
    return Begin(lineage=lineage.number, sequence=sequence, checkpoint=path)


async def begin(ranks: Ranks, lineage: Lineage | None) -> Begin:
    """Begin the lineage, on rank 0; return on every rank where it does. A collective.

    To hold a checkpoint against its digests, all of it is read: of a large model that takes longer than one rank may
    wait for another, so rank 0 says meanwhile that it is there.

    Args:
        ranks: those of this trainer.
        lineage: rank 0's; None on the others.

    Raises:
        UserError: no checkpoint is whole; in an ExceptionGroup.
    """
    order = WAIT
    chosen = anyio.Event()

    async def choose(lineage: Lineage) -> None:
        nonlocal order
        order = msgspec.json.encode(await begin_lineage(lineage))
        chosen.set()

    async with anyio.create_task_group() as work:
        if lineage is not None:
            work.start_soon(choose, lineage)
        received = WAIT
        while received == WAIT:
            if lineage is not None:
                with anyio.move_on_after(ranks.deadline_s / WAITS_PER_DEADLINE):
                    await chosen.wait()
            sent = order if lineage is not None else None
            received = await anyio.to_thread.run_sync(ranks.broadcast_bytes, sent, abandon_on_cancel=True)
    return msgspec.json.decode(received, type=Begin)
