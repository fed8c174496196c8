"""What trained batches have shown is kept beside them: each image once, found by its hash, gone with its lineage."""

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from areal_async.errors import UserError
from areal_async.protocol.types import Cut, CutSlot, Version
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.output import archived_images
from areal_async.trainer.output.archive import abandon_archive
from areal_async.trainer.output.archive_reader import archive_files, find_archived, read_recorded
from areal_async.trainer.output.archived_images import each_image, image_files, read_images
from tests.unit.trainer.archives import archive_seeing_step, archive_shard, archive_step
from tests.unit.trainer.models import rows_as_trained

MADE = Version(1, 2)
NAME = "step-000002-1-0.parquet"


def test_images_are_readable_as_a_data_set_that_decodes_them(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    shown = {one for row in archive_seeing_step(tmp_path, 2) for one in row.images}

    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "images" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )

    assert sorted(rows["sha256"][:]) == sorted(hashlib.sha256(one).hexdigest() for one in shown)
    by_hash = {hashlib.sha256(one).hexdigest(): Image.open(io.BytesIO(one)) for one in shown}
    for row in rows:
        wanted = by_hash[row["sha256"]]
        assert (row["width"], row["height"]) == wanted.size
        assert np.array_equal(np.asarray(row["image"]), np.asarray(wanted))


def test_archived_sequences_name_the_images_of_their_tokens_in_their_order(tmp_path: Path) -> None:
    rows = archive_seeing_step(tmp_path, 2)
    (paths,) = archive_files(tmp_path).values()
    recorded = read_recorded(paths)

    images = read_images(tmp_path, MADE, {sha256 for one in recorded for sha256 in one.trajectory.images})

    for one, row in zip(recorded, rows, strict=True):
        (sequence,) = one.trajectory.sequences
        assert tuple(images[ref.sha256] for ref in sequence.images or ()) == row.images
        assert [ref.num_bytes for ref in sequence.images or ()] == [len(image) for image in row.images]
    assert recorded[2].trajectory.sequences[0].images is None
    assert not read_recorded(paths, with_tokens=False)[0].trajectory.sequences


def test_a_sequence_without_images_beside_one_with_some_comes_back_as_it_was(tmp_path: Path) -> None:
    archive_seeing_step(tmp_path / "made", 2)
    seen, *_, last = read_recorded([tmp_path / "made" / "trajectories" / NAME])
    text = structs.replace(last.trajectory.sequences[0], images=None)
    both = structs.replace(seen.trajectory, sequences=[text, *seen.trajectory.sequences])
    slot = BatchSlot(position=0, group_id="0-1-0", workflow="w", item=CutSlot(slot=both.slot, sequence=1))

    archive_shard(
        tmp_path / "trajectories",
        made=MADE,
        cut=Cut(lineage=1, step=2, max_staleness=2),
        slots=[slot],
        trajectories={0: both},
        advantages={0: np.float32([0.5])},
        rows=rows_as_trained({0: both}, {0: 0.5}),
        images=read_images(tmp_path / "made", MADE, both.images),
    )

    (read,) = read_recorded([tmp_path / "trajectories" / NAME])
    assert [one.images for one in read.trajectory.sequences] == [None, both.sequences[1].images]


def test_a_run_without_images_has_no_file_and_no_column_of_them(tmp_path: Path) -> None:
    archive_step(tmp_path, 2)

    assert "images" not in pq.read_schema(tmp_path / "trajectories" / NAME).names
    assert [path.name for path in tmp_path.iterdir()] == ["trajectories"]
    modules = "areal_async.trainer.output.archive, areal_async.trainer.replay, areal_async.doctor.audit.files"
    code = f"import {modules}, sys; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_images_are_written_and_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_images, "GROUP_BYTES", 1500)  # an image has 1200

    shown = {one for row in archive_seeing_step(tmp_path, 2) for one in row.images}

    (path,) = image_files(tmp_path, MADE)
    assert pq.read_metadata(path).num_row_groups == len(shown) == 3
    assert {png for _, png in each_image(path)} == shown
    (last,) = list(each_image(path))[2:]
    assert list(each_image(path, {last[0]})) == [last]


def test_images_of_a_lineage_that_was_replaced_move_away_with_its_trajectories(tmp_path: Path) -> None:
    for step in (1, 2):
        archive_seeing_step(tmp_path, step)

    assert abandon_archive(tmp_path / "trajectories", after_step=1, before_lineage=2) == 4 - 2

    for folder in ("trajectories", "images"):
        assert [path.name for path in (tmp_path / folder).glob("*.parquet")] == ["step-000001-1-0.parquet"]
        assert [path.name for path in (tmp_path / folder / "abandoned").iterdir()] == [NAME]


def test_a_payload_that_is_gone_is_found_in_the_archive_with_its_images(tmp_path: Path) -> None:
    rows = archive_seeing_step(tmp_path, 2)
    abandon_archive(tmp_path / "trajectories", after_step=1, before_lineage=2)
    uids = {f"1-1-{index}" for index in range(len(rows))}

    found, images = find_archived(tmp_path, 2, uids)

    assert found.keys() == uids
    assert set(images.values()) == {one for row in rows for one in row.images}
    (tmp_path / "images" / "abandoned" / NAME).unlink()
    assert find_archived(tmp_path, 2, uids)[0].keys() == {"1-1-2"}  # which shows none


def test_an_image_that_is_not_there_or_is_another_is_refused_in_one_sentence(tmp_path: Path) -> None:
    archive_seeing_step(tmp_path, 2)
    (path,) = image_files(tmp_path, MADE)
    sha256, png = next(each_image(path))
    assert read_images(tmp_path, MADE, {sha256}) == {sha256: png}

    with pytest.raises(UserError, match="step 2 has shown the image 00, which is in none of its files in images/"):
        read_images(tmp_path, MADE, {"00", sha256})
    path.write_bytes(path.read_bytes().replace(png, png[:-1] + b"?"))
    with pytest.raises(UserError, match=f"the image {sha256}, which"):
        read_images(tmp_path, MADE, {sha256})
    path.write_bytes(b"cut short")
    with pytest.raises(UserError, match="cannot be read"):
        read_images(tmp_path, MADE, {sha256})
