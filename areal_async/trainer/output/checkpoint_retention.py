"""Which checkpoints stay on disk: from what a run's directory says.

Invariant: the newest ones, the one that a restart would begin from, and those that have a tag always stay; one that is
being read stays until it has been.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import structlog

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, keep_newest, versions_in
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.best import accuracies_of, find_best
from areal_async.versions.tags import BEST

NUM_AWAITED = 2
"""Checkpoints beyond the newest ones that wait for an evaluation to say how good they are."""

log = structlog.get_logger()


def keep(run_directory: Path, settings: Settings, *, recorded: Version) -> None:
    """Delete the checkpoints that no rule or tag keeps, and have ``checkpoints/best`` name the best, if one is wanted.

    Args:
        settings: with what operators have changed: when an evaluation is due, too.
        recorded: what a restart would begin from.
    """
    folder, trainer = run_directory / "checkpoints", settings.trainer

    def ours(versions: Iterable[Version]) -> list[Version]:
        """Leave out those of an older lineage and a later step: the run has gone back behind them."""
        return [one for one in versions if one.lineage >= recorded.lineage or one.step <= recorded.step]

    there = versions_in(folder)
    every = trainer.keep_every_steps
    also = {recorded} | {version for version in there if every is not None and version.step % every == 0}
    best = name_best(run_directory, settings)
    if best is not None:
        also.add(best)
    is_gated = settings.gate.action is not None
    if trainer.keep_best == "accuracy" or is_gated:
        evaluated = ours(accuracies_of(run_directory))
        also |= awaited(ours(there), evaluated, every_steps=settings.eval.every_steps)
        also |= _judged_now(ours(there), evaluated) if is_gated else set()
    names = {str(version) for version in also}

    def has_tag(name: str) -> bool:
        return Version.parse(name) in tags.tagged(run_directory)

    try:
        keep_newest(folder, trainer.keep_checkpoints, also=names, is_wanted=has_tag, lease=LEDGER)
    except UserError as exc:  # nothing tells what has a tag: no more is deleted until somebody has seen to that
        log.error("tags.unreadable", cause=str(exc))


def name_best(run_directory: Path, settings: Settings) -> Version | None:
    """Have ``checkpoints/best`` name the best checkpoint there is now, and return that one."""
    link, best = run_directory / "checkpoints" / BEST, find_best(run_directory, settings)
    if best is None:
        link.unlink(missing_ok=True)
        return None
    temporary = link.with_name(f".{BEST}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(best))
    temporary.rename(link)
    return best


def _judged_now(checkpoints: Iterable[Version], evaluated: Collection[Version]) -> set[Version]:
    """Return the checkpoint of which the newest evaluation speaks: the run's gate may be about to give it a tag."""
    newest = max((version.step for version in evaluated), default=-1)
    return set(sorted(version for version in checkpoints if version.step <= newest)[-1:])


def awaited(checkpoints: Iterable[Version], evaluated: Collection[Version], *, every_steps: int) -> set[Version]:
    """Return the newest few checkpoints at which an evaluation is due, and that none has come up to yet."""
    newest = max((version.step for version in evaluated), default=-1)
    due = [version for version in checkpoints if version.step > newest and not version.step % every_steps]
    return set(sorted(due)[-NUM_AWAITED:])
