"""Reading the archive of trained batches back. Imports no torch: the command line lists what is there with it.

Invariant: of each step only what the surviving lineage trained is read, and only a step that is whole.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import UserError
from areal_async.process.json_lines import json_lines
from areal_async.protocol.types import (
    NOT_CREDITED,
    NOT_SAMPLED,
    Cut,
    ImageRef,
    ReplyReward,
    Slot,
    SlotStatus,
    Trajectory,
    Version,
)
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.trainer.batch.cut import ages_in
from areal_async.trainer.output import archived_images

ABANDONED_METRICS = "metrics_abandoned.jsonl"
ABANDONED = "abandoned"
"""Folder, beside the files of what survives, of those that a run went back behind."""
"""File beside ``metrics.jsonl``: the lines of steps that the run went back behind."""
PARTIAL = ("turns", "temperatures", "steered")
"""Columns of the sequences that may be null, and that older archives are without."""
ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions", *PARTIAL)
"""Columns of the sequences that have a value for each token."""
IMAGES = "images"
"""Column of the sequences with what their tokens show; archives of models that do not see are without."""
SLOT_COLUMNS = (
    "sibling", "sample_uid", "reward", "oldest", "newest", "num_tokens", "num_output_tokens", "num_truncated",
)  # fmt: skip
"""Columns that are called what a slot's header calls them."""
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedTrajectory:
    """One trained trajectory, or its header alone."""

    cut: Cut
    """The cut of the step that trained it, without its groups."""
    position: int
    """Place in the step's whole batch, from 0."""
    group_id: str
    workflow: str
    advantages: tuple[float, ...]
    """Advantage of each credited reply, or the one of a trajectory without credits."""
    trajectory: Trajectory
    """Without sequences where only headers were read."""

    @property
    def advantage(self) -> float:
        """Mean advantage over its replies."""
        return sum(self.advantages) / len(self.advantages)

    @property
    def made(self) -> Version:
        """Version that the step which trained it made."""
        return Version(self.cut.lineage, self.cut.step)

    def age(self, version: Version) -> int:
        """Return the age that a token of ``version`` had in this step."""
        return ages_in(self.cut, self.cut.lineage)(version)

    def trained_mask(self, sequence: TokenSequence) -> list[bool]:
        """Say of each token whether it was in the loss: sampled, credited and, where over-age is masked, fresh."""
        is_credited = sequence.loss_mask if sequence.turns is None else sequence.turns != NOT_CREDITED
        fresh = {
            packed: packed == NOT_SAMPLED or self.age(Version.unpack(packed)) <= self.cut.max_staleness
            for packed in set(sequence.versions.tolist())
        }
        return [
            bool(one) and fresh[packed]
            for one, packed in zip(is_credited.tolist(), sequence.versions.tolist(), strict=True)
        ]


def read_lines(run_directory: Path) -> list[Line]:
    """Return the lines of ``metrics.jsonl`` that are whole, by step."""
    lines: dict[int, Line] = {}
    for line in json_lines(run_directory / "metrics.jsonl"):
        with suppress(ValueError, KeyError, TypeError):
            lines[int(line["step"])] = line
    return [line for _, line in sorted(lines.items())]


def archive_files(run_directory: Path) -> dict[Version, list[Path]]:
    """Return the files of each archived step's newest lineage, by the version that the step made."""
    found: dict[Version, list[Path]] = {}
    for path in sorted((run_directory / "trajectories").glob("step-*.parquet")):
        _, step, lineage, _ = path.stem.split("-")
        found.setdefault(Version(int(lineage), int(step)), []).append(path)
    newest = {version.step: version for version in sorted(found)}
    return {version: found[version] for _, version in sorted(newest.items())}


def whole_steps(run_directory: Path) -> list[tuple[Line, list[Path]]]:
    """Return metrics line and files of the steps that can be replayed: from the first to the last archived one.

    Raises:
        UserError: a step in the middle is not archived, or not all of it.
    """
    files = archive_files(run_directory)
    steps: list[tuple[Line, list[Path]]] = []
    gap = ""
    for number, line in enumerate(read_lines(run_directory), start=1):
        made = Version.parse(str(line["weights_version"]))
        paths = files.get(made, [])
        num_rows = sum(pq.read_metadata(path).num_rows for path in paths)
        if line["step"] != number or not paths or num_rows != line["num_trajectories"]:
            # The newest steps of a live run are not archived yet.
            gap = gap or f"step {number}: got {num_rows} archived trajectories, need {line['num_trajectories']}"
        elif gap:
            raise UserError(f"archive of {run_directory}: {gap}; restore its files in trajectories/")
        else:
            steps.append((line, paths))
    if not steps:
        raise UserError(f"archive of {run_directory}: {gap or 'no step is trained yet'}; need at least one whole step")
    return steps


def read_recorded(paths: Sequence[Path], *, with_tokens: bool = True) -> list[ArchivedTrajectory]:
    """Return what some files of one step hold, by position.

    Raises:
        UserError: a file cannot be read, or was written before all of this was archived.
    """
    recorded: list[ArchivedTrajectory] = []
    for path in paths:
        try:
            schema = pq.read_schema(path)
            unread = () if with_tokens else (*ARRAYS, IMAGES)
            table = pq.read_table(path, columns=[name for name in schema.names if name not in unread])
            recorded += _rows(table, with_tokens=with_tokens)
        except (OSError, pa.ArrowException) as exc:
            raise UserError(f"archive {path}: cannot be read: {str(exc).partition(chr(10))[0]}") from exc
        except KeyError as exc:
            raise UserError(
                f"archive {path}: got no column {str(exc).strip(chr(39))}, need it; it is of an older version of this "
                "program, which must read it"
            ) from exc
    return sorted(recorded, key=lambda one: one.position)


def find_archived(
    run_directory: Path, step: int, uids: Collection[str]
) -> tuple[dict[str, Trajectory], dict[str, bytes]]:
    """Return by their ids those trajectories that were trained in ``step``, by any lineage that has archived them.

    A lineage that is replaced has its files in ``abandoned/``. One that cannot be read counts as not there, as does a
    trajectory of which an image is not there.

    Returns:
        The trajectories, and the PNGs that they show, by hash.
    """
    name = f"step-{step:06d}-*.parquet"
    found: dict[str, Trajectory] = {}
    for path in sorted((run_directory / "trajectories").rglob(name)):
        with suppress(UserError):
            rows = read_recorded([path])
            found |= {
                one.trajectory.slot.sample_uid: one.trajectory for one in rows if one.trajectory.slot.sample_uid in uids
            }
    wanted = {sha256 for one in found.values() for sha256 in one.images}
    images: dict[str, bytes] = {}
    for path in sorted((run_directory / archived_images.FOLDER).rglob(name)) if wanted else ():
        with suppress(UserError):
            images |= archived_images.find_images([path], wanted - images.keys())
    return {uid: one for uid, one in found.items() if one.images.keys() <= images.keys()}, images


def _rows(table: pa.Table, *, with_tokens: bool) -> Iterator[ArchivedTrajectory]:
    scalars = [name for name in table.column_names if name not in (*ARRAYS, IMAGES)]
    for index, row in enumerate(table.select(scalars).to_pylist()):
        credits = row.get("credits") or []
        slot = Slot(
            status=SlotStatus.SCORED,
            **{name: row[name] for name in SLOT_COLUMNS},
            credits=[ReplyReward(one["reward"], one["num_tokens"], one["role"]) for one in credits],
        )
        yield ArchivedTrajectory(
            cut=Cut(
                lineage=row["lineage"],
                step=row["step"],
                max_staleness=row["max_staleness"],
                masks_stale=row["masks_stale"],
                branches=json.loads(row["branches"]),
                lr=row.get("lr") or 0.0,  # older archives have none
                numbers=json.loads(row.get("numbers") or "{}"),
            ),
            position=row["position"],
            group_id=row["group_id"],
            workflow=row["workflow"],
            advantages=tuple(one["advantage"] for one in credits) or (row["advantage"],),
            trajectory=Trajectory(
                slot=slot,
                sequences=sequences_of(table, index) if with_tokens else [],
                info=json.loads(row["info"]),
            ),
        )


def sequences_of(table: pa.Table, index: int) -> list[TokenSequence]:
    """Return the sequences of one row.

    Raises:
        KeyError, ValueError: a column is not there, or has more of them than another.
    """
    names = [name for name in ARRAYS if name not in PARTIAL or name in table.column_names]
    columns = {name: arrays for name in names if (arrays := arrays_of(table, name, index)) or name not in PARTIAL}
    if IMAGES in table.column_names and (shown := table.column(IMAGES)[index].as_py()) is not None:
        columns[IMAGES] = [[ImageRef(**one) for one in of_sequence] or None for of_sequence in shown]
    return [TokenSequence(**dict(zip(columns, arrays, strict=True))) for arrays in zip(*columns.values(), strict=True)]


def arrays_of(table: pa.Table, name: str, index: int) -> list[Any]:
    """Return the arrays of one row's sequences, without making Python objects of their values."""
    row = table.column(name)[index]
    return [one.values.to_numpy(zero_copy_only=False) for one in row] if row.is_valid else []
