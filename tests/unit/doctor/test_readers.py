"""The archive is read as it was written; what is wrong with a token's version is found in its columns."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_async.doctor.audit.files import read_archive, read_ledger
from areal_async.doctor.audit.versions import count_versions, find_faults
from areal_async.protocol.types import NOT_SAMPLED, Cut, CutSlot, Sequence, Slot, SlotStatus, Trajectory, Version
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.output.archived_images import image_files
from tests.unit.trainer.archives import archive_seeing_step, archive_shard
from tests.unit.trainer.models import rows_as_trained

OLD, NEW = Version(1, 3).pack(), Version(1, 4).pack()


def trajectory(sibling: int, *versions: list[int]) -> Trajectory:
    """Sequences with these versions on their tokens."""
    slot = Slot(sibling=sibling, sample_uid=f"u{sibling}", status=SlotStatus.SCORED, oldest="1-3", newest="1-4")
    sequences = [
        Sequence(
            token_ids=np.arange(len(one), dtype=np.int32),
            loss_mask=np.array(one) != NOT_SAMPLED,
            logprobs=np.zeros(len(one), dtype=np.float32),
            versions=np.array(one, dtype=np.int64),
        )
        for one in versions
    ]
    return Trajectory(slot=slot, sequences=sequences)


def columns(**changes: Any) -> Sequence:
    return msgspec.structs.replace(trajectory(0, [NOT_SAMPLED, OLD, NEW]).sequences[0], **changes)


def archive_two(folder: Path) -> Path:
    """Archive two trajectories as trained in step 5; return the file."""
    trajectories = {
        0: trajectory(0, [NOT_SAMPLED, OLD, NEW], [NOT_SAMPLED, NEW]),
        1: trajectory(1, [NOT_SAMPLED, NOT_SAMPLED, OLD]),
    }
    slots = [
        BatchSlot(position=position, group_id="0-1-0", workflow="w", item=CutSlot(slot=one.slot, sequence=1))
        for position, one in trajectories.items()
    ]
    archive_shard(
        folder,
        made=Version(1, 5),
        cut=Cut(lineage=1, step=5),
        slots=slots,
        trajectories=trajectories,
        advantages={0: np.float32([1.0]), 1: np.float32([-1.0])},
        rows=rows_as_trained(trajectories, {0: 1.0, 1: -1.0}),
    )
    return next(folder.glob("step-*.parquet"))


def test_every_row_of_the_archive_comes_back_with_its_own_tokens(tmp_path: Path) -> None:
    archive_two(tmp_path)
    (tmp_path / "step-000006-1-0.parquet").write_bytes(b"no parquet")

    rows, unreadable = read_archive(tmp_path)

    assert [(row.step, row.name, row.advantage, row.num_sampled) for row in rows] == [
        (5, "0-1-0.0", 1.0, 3),
        (5, "0-1-0.1", -1.0, 1),
    ]
    assert [row.num_by_version for row in rows] == [{OLD: 1, NEW: 2}, {OLD: 1}]
    assert [row.token_faults for row in rows] == [(), ()]
    assert [reason.split(":")[0] for reason in unreadable] == ["archive step-000006-1-0.parquet"]


def test_an_archive_of_before_there_were_credits_is_read(tmp_path: Path) -> None:
    path = archive_two(tmp_path)
    later = ["advantages", "credits", "turns", "temperatures", "steered"]
    pq.write_table(pq.read_table(path).drop_columns(later), path)

    rows, unreadable = read_archive(tmp_path)

    assert [row.num_by_version for row in rows] == [{OLD: 1, NEW: 2}, {OLD: 1}]
    assert unreadable == []


def test_an_archived_row_without_versions_is_told_of(tmp_path: Path) -> None:
    path = archive_two(tmp_path)
    table = pq.read_table(path)
    place = table.column_names.index("versions")
    nulls = pa.nulls(len(table), table.schema.field("versions").type)
    pq.write_table(table.set_column(place, "versions", nulls), path)

    rows, unreadable = read_archive(tmp_path)

    assert rows == []
    assert [reason.split(":")[0] for reason in unreadable] == [f"archive {path.name}"]


def test_archived_images_are_held_against_their_hashes_and_each_row_against_the_images(tmp_path: Path) -> None:
    rows = archive_seeing_step(tmp_path, 2)
    folder = tmp_path / "trajectories"
    (path,) = image_files(tmp_path, Version(1, 2))
    (shared, _), *_ = images = [(hashlib.sha256(one).hexdigest(), one) for one in rows[0].images]
    assert [row.image_faults for row in read_archive(folder)[0]] == [()] * 4

    path.write_bytes(path.read_bytes().replace(images[0][1], images[0][1][:-1] + b"?"))
    fault = f"image {shared}: its bytes in images/{path.name} have another hash"
    assert [row.image_faults for row in read_archive(folder)[0]] == [(fault,), (fault,), (), (fault,)]

    path.unlink()
    first, _, blind, _ = read_archive(folder)[0]
    assert first.image_faults == tuple(f"image {one}: it cannot be read in images/" for one, _ in sorted(images))
    assert blind.image_faults == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"versions": np.array([NOT_SAMPLED, NOT_SAMPLED, NEW])}, "1 sampled tokens without a version"),
        ({"versions": np.array([OLD, OLD, NEW])}, "1 tokens with a version that were not sampled"),
        ({"logprobs": np.array([0, np.nan, 0])}, "1 sampled tokens without a logprob"),
        ({"versions": np.array([NOT_SAMPLED, OLD])}, "columns of [2, 3] entries"),
        ({"versions": np.array([NOT_SAMPLED, OLD - 1, NEW])}, "its header says 1-3 to 1-4"),
    ],
)
def test_what_is_wrong_with_a_tokens_version_is_found(changes: dict[str, object], says: str) -> None:
    (fault,) = find_faults([columns(**changes)], oldest="1-3", newest="1-4")

    assert says in fault


def test_tokens_in_order_have_no_fault_and_are_counted_by_version() -> None:
    assert find_faults([columns(), columns()], oldest="1-2", newest="1-4") == ()
    assert count_versions([columns(), columns()]) == {OLD: 2, NEW: 2}


def test_the_newest_ledger_that_can_be_read_is_taken_and_a_broken_one_told_of(tmp_path: Path) -> None:
    for name, content in (("1-4", '{"version": "1-4", "trained": {"1": ["0-1-0"]}}'), ("2-12", "{"), ("1-8", None)):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "ledger").write_text(content)

    ledger, unreadable = read_ledger(tmp_path)

    assert ledger
    assert ledger.version == "1-4"
    assert [reason.split(":")[0] for reason in unreadable] == ["checkpoint 2-12", "checkpoint 1-8"]
