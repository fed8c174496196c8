"""Reading what a run has left in its directory: the archive with its images, the newest checkpoint's ledger."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.doctor.audit.run_record import ArchivedSlot
from areal_async.doctor.audit.versions import count_versions, find_faults
from areal_async.errors import UserError, WireError
from areal_async.process.atomic_folders import versions_in
from areal_async.protocol.types import ReplyReward, Sequence
from areal_async.trainer.output.archive_reader import IMAGES, arrays_of, sequences_of
from areal_async.trainer.output.archived_images import FOLDER, each_image
from areal_async.versions.restore_points import TrainedGroups, read_trained

SCALARS = (
    "step", "lineage", "position", "group_id", "sibling", "sample_uid", "reward", "advantage", "oldest", "newest",
)  # fmt: skip


def read_archive(directory: Path) -> tuple[list[ArchivedSlot], list[str]]:
    """Return the rows of every file that no restore has moved away, and which files cannot be read."""
    slots: list[ArchivedSlot] = []
    unreadable: list[str] = []
    for path in sorted(directory.glob("step-*.parquet")):
        try:
            table = pq.read_table(path)
            rows = list(_rows(table, _images_beside(path) if IMAGES in table.column_names else {}))
            if any(row.image_faults for row in rows) and not path.exists():
                continue
            slots += rows
        except FileNotFoundError:
            continue  # a restored trainer has just moved it away
        except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
            unreadable.append(f"archive {path.name}: {str(exc).partition(chr(10))[0]}")
    return slots, unreadable


def _images_beside(path: Path) -> dict[str, str]:
    """Return the images of a file of trajectories: hash -> what is wrong with it, empty for nothing."""
    beside = path.parent.parent / FOLDER / path.name
    images: dict[str, str] = {}
    try:
        for sha256, png in each_image(beside) if beside.exists() else ():
            is_whole = hashlib.sha256(png).hexdigest() == sha256
            images[sha256] = "" if is_whole else f"its bytes in {FOLDER}/{path.name} have another hash"
    except UserError:
        pass  # those that could not be read are not among them
    return images


def _image_faults(sequences: list[Sequence], images: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the images that sequences show."""
    for sha256 in sorted({ref.sha256 for sequence in sequences for ref in sequence.images or ()}):
        if fault := images.get(sha256, f"it cannot be read in {FOLDER}/"):
            yield f"image {sha256}: {fault}"


def _rows(table: pa.Table, images: Mapping[str, str]) -> Iterator[ArchivedSlot]:
    wanted = (*SCALARS, "credits") if "credits" in table.column_names else SCALARS  # older archives have none
    for index, scalars in enumerate(table.select(wanted).to_pylist()):
        sequences = sequences_of(table, index)
        oldest, newest = scalars.pop("oldest"), scalars.pop("newest")
        credits = scalars.pop("credits", None) or ()
        yield ArchivedSlot(
            **scalars,
            num_sampled=sum(int(np.count_nonzero(one.loss_mask)) for one in sequences),
            num_by_version=count_versions(sequences),
            token_faults=find_faults(sequences, oldest=oldest, newest=newest),
            image_faults=tuple(_image_faults(sequences, images)),
            credits=tuple(ReplyReward(one["reward"], one["num_tokens"], one["role"]) for one in credits),
            credit_advantages=tuple(one["advantage"] for one in credits),
            by_token=_moments(table, index),
        )


def _moments(table: pa.Table, index: int) -> tuple[float, float, int] | None:
    """Return sum, sum of squares and number of the trained tokens; None where they have their trajectory's."""
    advantages = arrays_of(table, "advantages", index) if "advantages" in table.column_names else []
    if not advantages:
        return None
    values = np.concatenate(advantages)
    trained = values[~np.isnan(values)]
    return float(trained.sum(dtype=np.float64)), float(np.square(trained, dtype=np.float64).sum()), len(trained)


def read_ledger(directory: Path) -> tuple[TrainedGroups | None, list[str]]:
    """Return the ledger of the newest checkpoint that has one that can be read, and why newer ones cannot."""
    unreadable: list[str] = []
    for version in reversed(versions_in(directory)):
        try:
            return read_trained(directory / str(version)), unreadable
        except (OSError, WireError) as exc:
            unreadable.append(f"checkpoint {version}: {exc}")
    return None, unreadable
