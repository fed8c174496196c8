"""What has been trained, kept: one Parquet file per step and rank, and one line of ``metrics.jsonl`` per step.

    datasets.load_dataset("parquet", data_files="runs/<name>/trajectories/*.parquet")

What a model has seen is beside them (``archived_images``), named by its hash. Files appear whole or not at all. What a
restored lineage replaces moves to ``abandoned/``.
"""

import itertools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from areal_async.algorithms.advantages import spread_over_tokens
from areal_async.errors import FencedError
from areal_async.process.atomic_folders import publish_file, write_whole
from areal_async.process.json_lines import read_json_lines
from areal_async.protocol.types import Metrics, Version
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.trainer.batch.step import TrainedShard
from areal_async.trainer.output import archived_images
from areal_async.trainer.output.archive_reader import ABANDONED, ABANDONED_METRICS, SLOT_COLUMNS
from areal_async.trainer.packing.rows import TrainRow

_FILE = re.compile(r"step-([0-9]+)-([0-9]+)-[0-9]+\.parquet").fullmatch
_CREDIT = pa.struct(
    [("reward", pa.float64()), ("num_tokens", pa.int64()), ("role", pa.string()), ("advantage", pa.float64())]
)
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
        ("advantages", pa.list_(pa.list_(pa.float32()))),
        ("credits", pa.list_(_CREDIT)),
        ("turns", pa.list_(pa.list_(pa.int16()))),
        ("num_tokens", pa.int64()),
        ("num_output_tokens", pa.int64()),
        ("num_truncated", pa.int64()),
        ("max_staleness", pa.int64()),
        ("masks_stale", pa.bool_()),
        ("branches", pa.string()),
        ("lr", pa.float64()),
        ("temperatures", pa.list_(pa.list_(pa.float32()))),
        ("numbers", pa.string()),
        ("steered", pa.list_(pa.list_(pa.bool_()))),
    ]
)
_IMAGE = pa.struct([("sha256", pa.string()), ("num_bytes", pa.int64()), ("width", pa.int32()), ("height", pa.int32())])
_SEEING_SCHEMA = _SCHEMA.append(pa.field("images", pa.list_(pa.list_(_IMAGE))))
"""Of a model that sees, whether or not it was shown anything: all files of a run have the same columns."""


def prepare() -> None:
    """Have pyarrow import what it does at its first table: all of pandas, for 0.3 s, where that is installed."""
    pa.Table.from_pylist([], schema=_SCHEMA)


def write_archive(
    directory: Path,
    shard: TrainedShard,
    *,
    made: Version,
    rank: int,
    advantages: Mapping[int, NDArray[np.float32]],
    images: Mapping[str, bytes] | None = None,
) -> None:
    """Store one rank's share of the batch of the step that made version ``made``; synced when this returns.

    ``advantage`` is what a trajectory was trained with, a mean where its tokens differ; those of its replies stand in
    ``credits``. Where rewards alone do not say it (a critic, a penalty, a call of the user's own) ``advantages`` has
    each token's as well, null on tokens that were not trained, and the others are means over trained tokens.

    ``temperatures`` has what each token was sampled at; null where that is the run's. ``steered`` is true on tokens
    that a grammar, a bias or a penalty had a say in; null where there are none. ``images`` has, sequence by sequence,
    what its tokens show, in their order.

    Args:
        shard: what a replay must know of its cut beside its slots goes into every row.
        advantages: by position; what rewards say of each credited reply, or of a trajectory without credits.
        images: hash -> the PNG, of all that the shard's tokens show; None of a model that does not see.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step-{made.step:06d}-{made.lineage}-{rank}.parquet"
    if images is not None:  # before the trajectories that name them
        shown = [sequence.images or () for one in shard.trajectories.values() for sequence in one.sequences]
        archived_images.write_images(_images_of(directory) / name, itertools.chain(*shown), images)
    cut, trained = shard.cut, defaultdict[int, list[TrainRow]](list)
    for row in shard.report.rows:
        trained[row.index].append(row)
    records = []
    for placed in shard.slots:
        trajectory = shard.trajectories[placed.position]
        slot = trajectory.slot
        own = _TokenAdvantages.of(trained[placed.position], trajectory.sequences, advantages[placed.position])
        record = {
            "step": made.step,
            "lineage": made.lineage,
            "position": placed.position,
            "group_id": placed.group_id,
            "workflow": placed.workflow,
            **{name: getattr(slot, name) for name in SLOT_COLUMNS},
            "advantage": own.mean,
            "advantages": own.by_token,
            "info": json.dumps(trajectory.info),
            "max_staleness": cut.max_staleness,
            "masks_stale": cut.masks_stale,
            "branches": json.dumps(cut.branches),
            "lr": cut.lr,
            "numbers": json.dumps(cut.numbers),
        }
        columns = ["token_ids", "loss_mask", "logprobs", "versions"]
        if slot.credits:
            columns.append("turns")
            record["credits"] = [
                {**msgspec.structs.asdict(credit), "advantage": advantage}
                for credit, advantage in zip(slot.credits, own.by_reply, strict=True)
            ]
        if all(sequence.temperatures is not None for sequence in trajectory.sequences):
            columns.append("temperatures")
        if any(sequence.steered is not None for sequence in trajectory.sequences):
            record["steered"] = [
                np.zeros(sequence.num_tokens, dtype=np.bool_) if sequence.steered is None else sequence.steered
                for sequence in trajectory.sequences
            ]
        for column in columns:
            # As arrays, which pyarrow copies whole: lists of numbers take 50 times as long, and no other thread runs.
            record[column] = [getattr(sequence, column) for sequence in trajectory.sequences]
        if any(sequence.images for sequence in trajectory.sequences):
            record["images"] = [msgspec.to_builtins(sequence.images or []) for sequence in trajectory.sequences]
        records.append(record)
    temporary = (directory / name).with_suffix(".tmp")
    schema = _SCHEMA if images is None else _SEEING_SCHEMA
    pq.write_table(pa.Table.from_pylist(records, schema=schema), temporary)
    publish_file(temporary, directory / name)


def _images_of(directory: Path) -> Path:
    """Return where the images of a folder's trajectories are."""
    return directory.with_name(archived_images.FOLDER)


class _TokenAdvantages(NamedTuple):
    """What the tokens of one trajectory were trained with."""

    mean: float
    """Over the trained tokens, or over the replies where rewards say it all."""
    by_token: list[list[float | None]] | None
    """Sequence by sequence; None where every token has what rewards say of its reply."""
    by_reply: list[float]
    """Mean over the trained tokens of each credited reply."""

    @classmethod
    def of(cls, rows: Sequence[TrainRow], sequences: Sequence[TokenSequence], said: NDArray[np.float32]) -> Self:
        """Compare what the rows were trained with to what rewards ``said`` of their replies."""
        values = [np.broadcast_to(np.float32(row.advantage), row.num_tokens) for row in rows]
        masks, sampled = [row.loss_mask for row in rows], [one.loss_mask for one in sequences]
        turns = [one.turns if one.turns is not None else np.zeros(len(one.token_ids), int) for one in sequences]
        if all(
            np.array_equal(values_L[sampled_L], spread_over_tokens(said, turns_L)[sampled_L])
            for values_L, sampled_L, turns_L in zip(values, sampled, turns, strict=True)
        ):
            return cls(float(np.mean(said, dtype=np.float64)), None, [float(one) for one in said])

        def mean(masks: Sequence[NDArray[np.bool_]]) -> float:
            chosen = np.concatenate([values_L[mask_L] for values_L, mask_L in zip(values, masks, strict=True)])
            return float(np.mean(chosen, dtype=np.float64)) if chosen.size else 0.0

        return cls(
            mean(masks if any(mask_L.any() for mask_L in masks) else sampled),
            [
                [float(value) if is_trained else None for value, is_trained in zip(values_L, mask_L, strict=True)]
                for values_L, mask_L in zip(values, masks, strict=True)
            ],
            [mean([mask & (turn == n) for mask, turn in zip(masks, turns, strict=True)]) for n in range(len(said))],
        )


def abandon_archive(directory: Path, *, after_step: int, before_lineage: int) -> int:
    """Move what older lineages wrote of later steps out of the way; return how many files.

    More than once: a trainer that was replaced may wake up and write after its successor has begun.
    """
    folders = directory, _images_of(directory)  # in this order: what can be found has its images
    return sum(_abandon(one, after_step=after_step, before_lineage=before_lineage) for one in folders)


def _abandon(directory: Path, *, after_step: int, before_lineage: int) -> int:
    if not directory.is_dir():
        return 0
    with os.scandir(directory) as entries:  # names alone, with every checkpoint: there is a file for every step
        files = (match for entry in entries if (match := _FILE(entry.name)))
        theirs = [match[0] for match in files if int(match[1]) > after_step and int(match[2]) < before_lineage]
    for name in theirs:
        (directory / ABANDONED).mkdir(exist_ok=True)
        (directory / name).rename(directory / ABANDONED / name)
    return len(theirs)


class MetricsFile:
    """``metrics.jsonl``: the surviving lineage's steps, one JSON object each. One trainer's view of it.

    Those that the run went back behind are beside it, in ``metrics_abandoned.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = self._look()
        """State of the file, as this trainer left it."""

    def append(self, line: Metrics) -> None:
        """Add the line of one step; what a trainer that was replaced has added meanwhile goes.

        Raises:
            FencedError: that trainer is this one: its successor has written.
        """
        if self._look() != self._state:
            mine = Version.parse(str(line["weights_version"])).lineage
            self.rewind(to_step=int(line["step"]) - 1, lineage=mine)
        with self._path.open("a") as file:
            file.write(json_line(line))
        self._state = self._look()

    def rewind(self, *, to_step: int, lineage: int) -> None:
        """Drop the lines of later steps, which are done anew, and of each step all but the newest lineage's.

        Raises:
            FencedError: there are some of a newer one than ``lineage``, who rewinds: it has been replaced.
        """
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        newest = max((version.lineage for version, _ in _newest_lines(content).values()), default=0)
        if newest > lineage:
            raise FencedError(f"lineage {lineage}: {self._path} is lineage {newest}'s; this trainer must stop")
        write_whole(self._path, lines_through(content, to_step))
        self._state = self._look()

    def abandon(self, *, after_step: int, lineage: int) -> None:
        """Keep the lines of later steps, which nothing stands in for any more, with ``abandoned_by``; each once."""
        content = self._path.read_bytes() if self._path.exists() else b""
        later = [line for step, (_, line) in sorted(_newest_lines(content).items()) if step > after_step]
        path = self._path.with_name(ABANDONED_METRICS)
        kept = read_json_lines(path)
        known = {line.get("weights_version") for line in kept}
        new = [one for one in map(json.loads, later) if one["weights_version"] not in known]
        if new:
            lines = [*kept, *({**one, "abandoned_by": lineage} for one in new)]
            write_whole(path, "".join(map(json_line, lines)).encode())

    def newest(self, count: int) -> list[dict[str, Any]]:
        """Return the last ``count`` lines, oldest first."""
        content = self._path.read_bytes() if self._path.exists() else b""
        return [json.loads(line) for _, (_, line) in sorted(_newest_lines(content).items())[-count:]]

    def _look(self) -> tuple[int, ...]:
        """Return what tells whether anybody has written: a replaced file is another one, even of the same size."""
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return ()
        return state.st_ino, state.st_size, state.st_mtime_ns


def json_line(line: Metrics) -> str:
    """Return numbers as a line of JSON, which has no NaN and no infinity: those are named in ``not_finite``."""
    bad = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
    kept = {name: value for name, value in line.items() if name not in bad}
    return json.dumps(kept | ({"not_finite": " ".join(bad)} if bad else {}), allow_nan=False) + "\n"


def lines_through(content: bytes, step: int) -> bytes:
    """Return the lines of steps up to ``step``, the newest lineage's where a step has several.

    One that a crash cut short, or damaged, is left out.
    """
    return b"".join(line for number, (_, line) in sorted(_newest_lines(content).items()) if number <= step)


def _newest_lines(content: bytes) -> dict[int, tuple[Version, bytes]]:
    """Read the lines that are whole: step -> the newest version made by it, and its line."""
    kept: dict[int, tuple[Version, bytes]] = {}
    for text in content.split(b"\n"):
        try:
            line = json.loads(text)
            number, version = int(line["step"]), Version.parse(line["weights_version"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        if number not in kept or kept[number][0] <= version:
            kept[number] = version, text + b"\n"
    return kept
