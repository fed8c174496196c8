"""Event loops that stand still, told to the user: a node that is held up cannot use the bus, but leaves a file."""

from collections.abc import Callable
from pathlib import Path

import anyio

from areal_async.launch.process_group import Death
from areal_async.launch.supervisor import Notify
from areal_async.rollout.user_code.loop_block_report import ENDED_FOR_CULPRIT, LoopBlockFile, read_all

INTERVAL_S = 0.5


async def run_blockages(run_directory: Path, notify: Notify) -> None:
    """Tell of every blocked loop on this host, once, until cancelled.

    consumes:     the nodes' files
    waits for:    the next look
    produces:     one line for each
    unblocked by: cancellation alone
    """
    told: set[str] = {one.sentence for one in read_all(run_directory)}  # of an earlier start
    while True:
        sentences = {one.sentence for one in read_all(run_directory)}
        for sentence in sorted(sentences - told):
            notify(sentence)
        told = sentences
        await anyio.sleep(INTERVAL_S)


def excuse_for(run_directory: Path, node_id: str) -> Callable[[Death], str | None]:
    """Return what excuses a death of this node: it ended itself, and names the slot that it did so for."""

    def excuse(death: Death) -> str | None:
        blockage = LoopBlockFile(run_directory, node_id).read() if death.status == ENDED_FOR_CULPRIT else None
        if blockage is None or blockage.work is None:
            return None
        return (
            f"node {node_id} ended itself after {blockage.blocked_s:.0f} s: {blockage.sentence}; that slot has failed"
        )

    return excuse
