"""Reading what a run has left in its directory: the archive, the newest checkpoint's ledger."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.doctor.audit.run_record import ArchivedSlot, TrainedGroups
from areal_async.doctor.audit.versions import Array, Columns, count_versions, find_faults
from areal_async.errors import WireError
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.protocol.types import ReplyReward
from areal_async.protocol.wire import decode_json

SCALARS = (
    "step", "lineage", "position", "group_id", "sibling", "sample_uid", "reward", "advantage", "oldest", "newest",
)  # fmt: skip


def read_archive(directory: Path) -> tuple[list[ArchivedSlot], list[str]]:
    """Return the rows of every file that no restore has moved away, and which files cannot be read."""
    slots: list[ArchivedSlot] = []
    unreadable: list[str] = []
    for path in sorted(directory.glob("step-*.parquet")):
        try:
            slots += _rows(pq.read_table(path))
        except FileNotFoundError:
            continue  # a restored trainer has just moved it away
        except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
            unreadable.append(f"archive {path.name}: {str(exc).partition(chr(10))[0]}")
    return slots, unreadable


def _rows(table: pa.Table) -> Iterator[ArchivedSlot]:
    columns = [_ListsOfLists(table.column(name)) for name in Columns._fields]
    advantages = _ListsOfLists(table.column("advantages")) if "advantages" in table.column_names else None
    has_credits = "credits" in table.column_names
    credits = table.column("credits").to_pylist() if has_credits else [None] * len(table)
    for index, scalars in enumerate(table.select(SCALARS).to_pylist()):
        sequences = [Columns(*parts) for parts in zip(*(column.row(index) for column in columns), strict=True)]
        oldest, newest = scalars.pop("oldest"), scalars.pop("newest")
        yield ArchivedSlot(
            **scalars,
            num_sampled=sum(int(np.count_nonzero(one.loss_mask)) for one in sequences),
            num_by_version=count_versions(sequences),
            token_faults=find_faults(sequences, oldest=oldest, newest=newest),
            credits=tuple(ReplyReward(one["reward"], one["num_tokens"], one["role"]) for one in credits[index] or ()),
            credit_advantages=tuple(one["advantage"] for one in credits[index] or ()),
            by_token=_moments(advantages.row(index)) if advantages is not None else None,
        )


def _moments(advantages: list[Array]) -> tuple[float, float, int] | None:
    """Return sum, sum of squares and number of the trained tokens; None where they have their trajectory's."""
    if not advantages:
        return None
    values = np.concatenate(advantages)
    trained = values[~values.mask] if isinstance(values, np.ma.MaskedArray) else values[~np.isnan(values)]
    return float(trained.sum(dtype=np.float64)), float(np.square(trained, dtype=np.float64).sum()), len(trained)


class _ListsOfLists:
    """A column of lists of lists, row by row, without making Python objects of its values."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        outer = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
        self._rows: Array = outer.offsets.to_numpy()
        self._sequences: Array = outer.values.offsets.to_numpy()
        self._values: Array = outer.values.values.to_numpy(zero_copy_only=False)

    def row(self, index: int) -> list[Array]:
        start, end = self._rows[index], self._rows[index + 1]
        return [self._values[self._sequences[at] : self._sequences[at + 1]] for at in range(start, end)]


def read_ledger(directory: Path) -> tuple[TrainedGroups | None, list[str]]:
    """Return the ledger of the newest checkpoint that has one that can be read, and why newer ones cannot."""
    unreadable: list[str] = []
    for version in reversed(versions_in(directory)):
        try:
            return decode_json(
                (directory / str(version) / LEDGER).read_bytes(), TrainedGroups, what="ledger"
            ), unreadable
        except (OSError, WireError) as exc:
            unreadable.append(f"checkpoint {version}: {exc}")
    return None, unreadable
