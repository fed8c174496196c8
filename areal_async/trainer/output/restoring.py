"""Which checkpoint a lineage begins from: the newest, or, where that one is damaged, the newest whole one before it; or
the one that an order to go back names, as a checkpoint of this lineage.

What was trained after an older one is trained again from the journal, with payloads that are still stored, or from
the archive (``recorded.find_archived``): a checkpoint that was whole once let the messages go.
"""

from functools import partial
from pathlib import Path

import anyio.to_thread
import structlog

from areal_async.config.change_record import ordered_rollback, record_change
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, held, link_folder
from areal_async.protocol.events import CheckpointDamaged
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.types import CheckpointRecord, Version
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.digests import damage, digest_of_sums, newest_intact, set_aside
from areal_async.versions.restore_points import is_restore_point

log = structlog.get_logger()


async def choose_checkpoint(lineage: Lineage) -> None:
    """Hold the newest checkpoint against its digests; where they differ, go back to one that is whole, and say so.

    Raises:
        UserError: there is none.
    """
    newest = lineage.checkpoint
    if newest is None:
        return
    path = Path(newest.path)
    reason = await anyio.to_thread.run_sync(partial(damage, path, sums_sha256=newest.sums_sha256))
    if not reason:
        return

    journal = await lineage.read_log(is_whole=True)

    def find() -> Path | None:
        version = Version.parse(newest.version)
        return newest_intact(path.parent, before=version, fits=lambda one: is_restore_point(one, journal))

    older = await anyio.to_thread.run_sync(find)
    if older is None:
        raise UserError(
            f"checkpoint {newest.version}: {reason}, and there is no older one that is whole; restore it in {path}, "
            "or start anew with --fresh"
        )
    log.error("checkpoint.damaged", version=newest.version, reason=reason, taken=older.name)
    record = CheckpointRecord(version=older.name, path=str(older), sums_sha256=digest_of_sums(older))
    damaged = CheckpointDamaged(version=newest.version, reason=reason, taken=older.name)
    await lineage.record_checkpoint(record, event=damaged)
    await anyio.to_thread.run_sync(set_aside, path)


async def go_back(lineage: Lineage, order: Rollback) -> str:
    """Make the checkpoint that an order names the newest, as one of this lineage; return why that cannot be.

    Others find it by its name to be the newest, from before what follows it is given up.
    """
    if lineage.checkpoint is None:
        return "the run has no checkpoint"
    folder = Path(lineage.checkpoint.path).parent
    await anyio.to_thread.run_sync(record_change, folder.parent, ordered_rollback(order))
    source, version = folder / order.version, Version(lineage.number, Version.parse(order.version).step)
    journal = await lineage.read_log(is_whole=True)

    def copy() -> str:
        with held(source, LEDGER):
            reason = damage(source)
            if not reason and not is_restore_point(source, journal):
                reason = "its steps were given up since, or trained otherwise"
            if not reason:
                link_folder(source, folder / str(version))
            return reason

    if reason := await anyio.to_thread.run_sync(copy):
        log.error("rollback.refused", version=order.version, reason=reason)
        return reason
    path = folder / str(version)
    await lineage.record_checkpoint(
        CheckpointRecord(version=str(version), path=str(path), sums_sha256=digest_of_sums(path))
    )
    log.info("rollback.begun", version=order.version, by=order.by, reason=order.reason)
    return ""
