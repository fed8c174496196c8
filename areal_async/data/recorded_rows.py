"""The rows that a run is made of, recorded at its start by their number and their hash, and held to when it goes on.

Those of an environment are recorded one by one, by the id and the hash that each has.

A prompt is known by the place of its row alone, so other rows under the same name would be other prompts, some of
them trained already under another text, and evaluations of other rows do not compare.
"""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from areal_async.config.settings import DatasetSettings
from areal_async.data.images import image_columns
from areal_async.environments.environment import CONTENT, TASK_ID
from areal_async.errors import UserError
from areal_async.process.atomic_folders import write_whole

BATCH_ROWS = 1000
IMAGE_BATCH_ROWS = 8
"""As many where rows have images: each may be of megabytes."""
SHOWN = 12
"""Digits of a hash that a message has."""


class Used(NamedTuple):
    """Rows that a run takes."""

    setting: str
    """Name of the setting that names the rows: ``tasks.0.dataset``."""
    source: DatasetSettings
    rows: Any
    """A ``datasets.Dataset``."""
    limit: int | None = None
    """How many rows to evaluate are taken at most; None for rows to train on.

    Rows to evaluate may be named otherwise when the run goes on.
    """


class _RowsDigest(msgspec.Struct, frozen=True):
    num_rows: int
    sha256: str
    source: dict[str, Any]
    limit: int | None = None
    tasks: list[tuple[str, str]] = []
    """Id and hash of each task of an environment, in their order; empty for other rows."""


def refuse_other_rows(file: Path, used: Sequence[Used], *, run: str) -> None:
    """Check that a run's rows are those that it was begun with; record those of which nothing is recorded.

    Args:
        file: where the records are.

    Raises:
        UserError: some are others, or in another order; or the file cannot be read.
    """
    before = _read(file)
    now = {one.setting: _record(one) for one in used}
    for one in used:
        recorded, found = before.get(one.setting), now[one.setting]
        if recorded is None:
            continue
        if one.limit is not None and (recorded.source, recorded.limit) != (found.source, found.limit):
            continue  # other rows to evaluate were chosen
        if (recorded.num_rows, recorded.sha256) != (found.num_rows, found.sha256):
            other = _first_other(recorded.tasks, found.tasks)
            seeded = "seed what is random in its function, " if one.source.python else ""
            raise UserError(
                f"run {run}: {one.setting}: got {_described(found)} from {one.source.source}, need the "
                f"{_described(recorded)}, in their order, that the run has recorded at its start{other}; put back what "
                f"was, {seeded}choose another --run.name, or give --fresh to start anew"
            )
    if before | now != before:
        write_whole(file, msgspec.json.format(msgspec.json.encode(before | now)))


def digest_of(rows: Any) -> str:
    """Return the SHA-256 of a ``datasets.Dataset``'s rows in their order, whatever the order of their columns."""
    digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=repr, order="sorted")
    batch_size = IMAGE_BATCH_ROWS if image_columns(rows) else BATCH_ROWS
    for batch in rows.with_format("arrow").iter(batch_size=batch_size):
        digest.update(encoder.encode_lines(batch.to_pylist()))
    return digest.hexdigest()


def _record(used: Used) -> _RowsDigest:
    source = used.source.model_dump(mode="json")
    is_named = used.source.environment is not None
    tasks = [*zip(used.rows[TASK_ID], used.rows[CONTENT], strict=True)] if is_named else []
    return _RowsDigest(len(used.rows), digest_of(used.rows), source, used.limit, tasks)


def _first_other(before: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str:
    """Say which task is the first that is another one; nothing where no task has a name."""
    for place, (was, found) in enumerate(itertools.zip_longest(before, now, fillvalue=("none", ""))):
        if was[0] != found[0]:
            return f" (task {place} was {was[0]:.80}, is {found[0]:.80})"
        if was != found:
            return f" (task {place}, {was[0]:.80}, has another content)"
    return ""


def _described(record: _RowsDigest) -> str:
    return f"{record.num_rows} rows with SHA-256 {record.sha256[:SHOWN]}"


def _read(file: Path) -> dict[str, _RowsDigest]:
    """Return what is recorded; nothing of a run that was begun before rows were, but for digests of functions."""
    if not file.is_file():
        return {}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, _RowsDigest | str])
    except (OSError, msgspec.DecodeError) as exc:
        raise UserError(
            f"{file}: cannot be read: {exc}; remove it, and the rows of now are taken for those of the start"
        ) from exc
    return {setting: one for setting, one in found.items() if isinstance(one, _RowsDigest)}
