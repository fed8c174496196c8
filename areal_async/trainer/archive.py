"""What has been trained, kept: one Parquet file per step and rank, and one line of ``metrics.jsonl`` per step.

    datasets.load_dataset("parquet", data_files="runs/<name>/trajectories/*.parquet")

Files appear whole or not at all. What a restored lineage replaces moves to ``abandoned/``.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.trainer.payloads import Placed
from areal_async.types import Metrics, Trajectory, Version

_VERSION = re.compile(r"\d+-\d+")
_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("lineage", pa.int64()),
        ("position", pa.int64()),
        ("group_id", pa.string()),
        ("sibling", pa.int32()),
        ("sample_uid", pa.string()),
        ("workflow", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("oldest", pa.string()),
        ("newest", pa.string()),
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("loss_mask", pa.list_(pa.list_(pa.bool_()))),
        ("logprobs", pa.list_(pa.list_(pa.float32()))),
        ("versions", pa.list_(pa.list_(pa.int64()))),
        ("info", pa.string()),
    ]
)


def write_archive(
    directory: Path,
    *,
    made: Version,
    rank: int,
    slots: Sequence[Placed],
    trajectories: Mapping[int, Trajectory],
    advantages: Mapping[int, float],
) -> None:
    """Store one rank's share of the batch of the step that made version ``made``; synced when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for placed in slots:
        trajectory = trajectories[placed.position]
        slot = trajectory.slot
        row = {
            "step": made.step,
            "lineage": made.lineage,
            "position": placed.position,
            "group_id": placed.group_id,
            "sibling": slot.sibling,
            "sample_uid": slot.sample_uid,
            "workflow": placed.workflow,
            "reward": slot.reward,
            "advantage": advantages[placed.position],
            "oldest": slot.oldest,
            "newest": slot.newest,
            "info": json.dumps(trajectory.info),
        }
        for column in ("token_ids", "loss_mask", "logprobs", "versions"):
            row[column] = [getattr(sequence, column).tolist() for sequence in trajectory.sequences]
        rows.append(row)
    path = directory / f"step-{made.step:06d}-{made.lineage}-{rank}.parquet"
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary)
    _publish_file(temporary, path)


def abandon_archive(directory: Path, *, after_step: int) -> int:
    """Move the files of later steps out of the way; return how many."""
    moved = 0
    for path in sorted(directory.glob("step-*.parquet")):
        if int(path.stem.split("-")[1]) > after_step:
            (directory / "abandoned").mkdir(exist_ok=True)
            path.rename(directory / "abandoned" / path.name)
            moved += 1
    return moved


class MetricsFile:
    """``metrics.jsonl``: the surviving lineage's steps, one JSON object each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: Metrics) -> None:
        """Add the line of one step."""
        with self._path.open("a") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def rewind(self, *, to_step: int) -> None:
        """Drop the lines of later steps: they are done anew."""
        if not self._path.exists():
            return
        kept = lines_through(self._path.read_bytes(), to_step)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(kept)
        _publish_file(temporary, self._path)


def lines_through(content: bytes, step: int) -> bytes:
    """Return the lines of steps up to ``step``; one that a crash cut short, or damaged, is left out."""
    kept = []
    for line in content.split(b"\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return b"".join(kept)


def keep_newest(directory: Path, count: int) -> None:
    """Delete all but the newest ``<lineage>-<step>`` folders of a directory."""
    for leftover in (*directory.glob(".*.partial"), *directory.glob(".*.replaced")):
        shutil.rmtree(leftover)  # of a save that a crash cut short
    folders = [path for path in directory.iterdir() if path.is_dir() and _VERSION.fullmatch(path.name)]
    for path in sorted(folders, key=lambda path: Version.parse(path.name))[:-count]:
        shutil.rmtree(path)


def _publish_file(temporary: Path, path: Path) -> None:
    """Make a finished file appear under its name, through a power cut too."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
