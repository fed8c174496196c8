"""Which checkpoints a run may go on from: those on disk whose every step it still stands on."""

from pathlib import Path

import msgspec

from areal_async.errors import WireError
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.protocol.fields import GroupIdText, StepText, VersionText
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Version
from areal_async.protocol.wire import decode_json


class TrainedGroups(msgspec.Struct, frozen=True):
    """What a checkpoint says that its weights were trained on."""

    version: VersionText
    trained: dict[StepText, list[GroupIdText]]
    """step -> group ids."""


def read_trained(checkpoint: Path) -> TrainedGroups:
    """Read what a checkpoint was trained on.

    Raises:
        OSError: it is no checkpoint, or is being deleted.
        WireError: that file is damaged.
    """
    return decode_json((checkpoint / LEDGER).read_bytes(), TrainedGroups, what="ledger")


def restore_points(run_directory: Path, journal: Journal) -> list[Version]:
    """Return the checkpoints of steps that a run still stands on, oldest first.

    Whether one holds what was trained in them, and is whole, is looked at when it is chosen.

    Args:
        journal: of the run, as it is now.
    """
    folder = run_directory / "checkpoints"
    there = (version for version in versions_in(folder) if (folder / str(version) / LEDGER).is_file())
    return [version for version in there if journal.survives(version)]


def is_restore_point(checkpoint: Path, journal: Journal) -> bool:
    """Say whether a checkpoint holds nothing that the run has given up since, or trained otherwise."""
    try:
        trained = read_trained(checkpoint).trained.items()
    except (OSError, WireError):
        return False
    return journal.fits(Version.parse(checkpoint.name), ((int(step), groups) for step, groups in trained))
