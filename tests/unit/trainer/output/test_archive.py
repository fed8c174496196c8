"""Archive files appear whole, and what a restored lineage replaces is moved or dropped."""

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from areal_async.errors import FencedError
from areal_async.process.atomic_folders import keep_newest
from areal_async.protocol.types import Cut, CutSlot, Sequence, Slot, SlotStatus, Trajectory, Version
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.output.archive import MetricsFile, abandon_archive
from tests.unit.trainer.archives import archive_shard
from tests.unit.trainer.models import rows_as_trained


def _write(directory: Path, step: int, *, lineage: int = 1, num_times: int = 1) -> None:
    slot = Slot(sibling=0, sample_uid="u", status=SlotStatus.SCORED, reward=1.0, oldest="1-0", newest="1-0")
    sequence = Sequence(
        token_ids=np.array([7, 8] * num_times, dtype=np.int32),
        loss_mask=np.array([False, True] * num_times),
        logprobs=np.array([0, -0.5] * num_times, dtype=np.float32),
        versions=np.array([-1, Version(1, 0).pack()] * num_times, dtype=np.int64),
        temperatures=np.array([0.5, 0.5] * num_times, dtype=np.float32),
    )
    trajectories = {0: Trajectory(slot=slot, sequences=[sequence], info={"turns": 1.0})}
    archive_shard(
        directory,
        made=Version(lineage, step),
        cut=Cut(lineage=lineage, step=step, max_staleness=2),
        slots=[BatchSlot(position=0, group_id="0-0-0", workflow="w", item=CutSlot(slot=slot, sequence=1))],
        trajectories=trajectories,
        advantages={0: np.array([0.25], dtype=np.float32)},
        rows=rows_as_trained(trajectories, {0: 0.25}),
    )


@pytest.mark.filterwarnings("ignore")  # datasets' own
def _line(step: int, *, lineage: int = 1) -> dict[str, int | str]:
    return {"step": step, "weights_version": str(Version(lineage, step))}


def test_nothing_is_imported_beside_the_first_steps() -> None:
    """pyarrow imports pandas at its first table: 0.3 s in which the step's own thread stands still."""
    code = (
        "import sys, pyarrow\n"
        "from areal_async.trainer.output import archive\n"
        "archive.prepare()\n"
        "known = set(sys.modules)\n"
        "table = pyarrow.Table.from_pylist([{'step': 1, 'token_ids': [[7, 8]]}], schema=archive._SCHEMA)\n"
        "print(len(table), sorted(set(sys.modules) - known))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == "1 []\n"


def test_the_archive_is_readable_as_a_data_set(tmp_path: Path) -> None:
    import datasets

    _write(tmp_path, 1)
    _write(tmp_path, 2)

    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )

    assert rows["step"][:] == [1, 2]
    assert rows[0]["token_ids"] == [[7, 8]]
    assert rows[0]["versions"] == [[-1, Version(1, 0).pack()]]
    assert rows[0]["temperatures"] == [[0.5, 0.5]]
    assert (rows[0]["advantage"], rows[0]["advantages"]) == (0.25, None)
    assert not list(tmp_path.glob("*.tmp"))


def test_no_token_becomes_an_object_of_python_to_be_archived(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    num_tokens = 1 << 20
    tracemalloc.start()
    try:
        _write(tmp_path, 2, num_times=num_tokens // 2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 64 * num_tokens  # numbers in lists come to 125, with those that the test itself makes


def test_steps_after_the_checkpoint_move_out_of_the_way(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)

    assert abandon_archive(tmp_path, after_step=1, before_lineage=2) == 2

    assert [path.name for path in tmp_path.glob("*.parquet")] == ["step-000001-1-0.parquet"]
    assert len(list((tmp_path / "abandoned").iterdir())) == 2


def test_what_the_lineage_itself_wrote_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        _write(tmp_path, step)

    assert abandon_archive(tmp_path, after_step=0, before_lineage=1) == 0


def test_to_look_through_the_archive_of_a_long_run_takes_no_memory_for_what_stays(tmp_path: Path) -> None:
    for step in range(1, 3001):
        (tmp_path / f"step-{step:06d}-2-0.parquet").touch()
    (tmp_path / "step-002900-1-0.parquet").touch()

    tracemalloc.start()
    try:
        assert abandon_archive(tmp_path, after_step=2500, before_lineage=2) == 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_metrics_are_rewound_to_the_checkpoint_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append(_line(step))
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 4, "rew')

    file.rewind(to_step=2, lineage=2)
    file.append(_line(3, lineage=2))

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_lines_that_the_run_went_back_behind_are_kept_once_and_told_by_whom(tmp_path: Path) -> None:
    file, abandoned = MetricsFile(tmp_path / "metrics.jsonl"), tmp_path / "metrics_abandoned.jsonl"
    for step in (1, 2, 3):
        file.append(_line(step))
    for lineage in (2, 3):  # the first was killed before it took them back
        file.abandon(after_step=1, lineage=lineage)
    file.rewind(to_step=1, lineage=3)
    file.append(_line(2, lineage=3))
    file.abandon(after_step=1, lineage=4)

    lines = [json.loads(line) for line in abandoned.read_text().splitlines()]
    told = [(line["step"], line["weights_version"], line["abandoned_by"]) for line in lines]
    assert told == [(2, "1-2", 2), (3, "1-3", 2), (2, "3-2", 4)]


def test_where_nothing_is_given_up_nothing_is_kept(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(_line(1))

    file.abandon(after_step=1, lineage=2)

    assert not (tmp_path / "metrics_abandoned.jsonl").exists()


def test_numbers_that_are_none_are_named_and_not_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")

    file.append({**_line(1), "loss": math.nan, "grad_norm": math.inf, "reward_mean": 0.5})
    file.append(_line(2))

    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {**_line(1), "reward_mean": 0.5, "not_finite": "loss grad_norm"}
    assert second == _line(2)


def test_what_a_replaced_trainer_still_writes_is_dropped_by_its_successor(tmp_path: Path) -> None:
    zombie, trainer = MetricsFile(tmp_path / "metrics.jsonl"), MetricsFile(tmp_path / "metrics.jsonl")
    zombie.append(_line(1))
    zombie.append(_line(2))
    trainer.rewind(to_step=1, lineage=2)
    zombie.append(_line(2))
    trainer.append(_line(2, lineage=2))

    with pytest.raises(FencedError, match="lineage 2's"):
        zombie.append(_line(3))

    trainer.append(_line(3, lineage=2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights_version"] for line in lines] == ["1-1", "2-2", "2-3"]


def test_a_trainer_that_was_replaced_before_it_restored_takes_no_line_back(tmp_path: Path) -> None:
    """It has taken its lineage and its checkpoint, and was cut off before it looked at the file."""
    zombie, trainer = MetricsFile(tmp_path / "metrics.jsonl"), MetricsFile(tmp_path / "metrics.jsonl")
    trainer.append(_line(1, lineage=1))
    trainer.append(_line(2, lineage=3))

    with pytest.raises(FencedError, match="lineage 3's"):
        zombie.rewind(to_step=1, lineage=2)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights_version"] for line in lines] == ["1-1", "3-2"]


def test_what_a_newer_trainer_is_writing_is_left_alone_by_the_one_that_it_has_replaced(tmp_path: Path) -> None:
    for name in (".1-4.partial", ".2-5.partial", ".3-5.partial", ".x.replaced"):
        (tmp_path / name).mkdir()

    keep_newest(tmp_path, 2, lineage=2)

    assert [path.name for path in tmp_path.iterdir()] == [".3-5.partial"]


def test_the_newest_folders_are_kept_by_version_and_not_by_name(tmp_path: Path) -> None:
    for name in ("1-9", "1-10", "2-3", "1-2", "other"):
        (tmp_path / name).mkdir()

    keep_newest(tmp_path, 2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10", "2-3", "other"]
