"""A run goes on with the rows that it was begun with, in their order, or says in one sentence that they are others."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_async.config.settings import DatasetSettings
from areal_async.data.made_rows import rows_of_seeds
from areal_async.data.recorded_rows import Used, digest_of, refuse_other_rows
from areal_async.data.rows import load_rows
from areal_async.errors import UserError

ROWS = [{"question": f"{number}+1?", "answer": str(number + 1), "tags": ["a", str(number)]} for number in range(5)]
CHANGED = [*ROWS[:2], {**ROWS[2], "answer": "4"}, *ROWS[3:]]
SWAPPED = [ROWS[1], ROWS[0], *ROWS[2:]]


def used(path: Path, rows: Sequence[object], *, setting: str = "tasks.0.dataset", limit: int | None = None) -> Used:
    """Write a file of rows, and load them from there."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSettings(path=str(path))
    loaded = load_rows(source)
    return Used(setting, source, loaded.select(range(min(limit, len(loaded)))) if limit else loaded, limit)


@pytest.mark.parametrize("others", [CHANGED, SWAPPED, ROWS[:4], [*ROWS, ROWS[0]]])
def test_other_rows_are_refused_with_their_name_what_was_recorded_and_what_to_do(
    tmp_path: Path, others: list[object]
) -> None:
    file, data = tmp_path / "rows.json", tmp_path / "data.jsonl"
    refuse_other_rows(file, [used(data, ROWS)], run="mine")
    refuse_other_rows(file, [used(data, ROWS)], run="mine")
    recorded = file.read_bytes()

    with pytest.raises(UserError) as caught:
        refuse_other_rows(file, [used(data, others)], run="mine")

    was, now = digest_of(used(data, ROWS).rows)[:12], digest_of(used(data, others).rows)[:12]
    assert str(caught.value) == (
        f"run mine: tasks.0.dataset: got {len(others)} rows with SHA-256 {now} from {data}, need the 5 rows with "
        f"SHA-256 {was}, in their order, that the run has recorded at its start; put back what was, choose another "
        "--run.name, or give --fresh to start anew"
    )
    assert file.read_bytes() == recorded
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_are_the_same_whatever_file_they_stand_in_and_in_whatever_order_their_columns_are(tmp_path: Path) -> None:
    first = used(tmp_path / "data.jsonl", ROWS)
    turned = used(tmp_path / "turned.jsonl", [dict(reversed(row.items())) for row in ROWS])
    first.rows.to_parquet(tmp_path / "data.parquet")
    as_parquet = load_rows(DatasetSettings(path=str(tmp_path / "data.parquet")))

    assert digest_of(first.rows) == digest_of(turned.rows) == digest_of(as_parquet)


def test_rows_of_a_function_and_of_seeds_are_held_to_as_well(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    made, seeds = DatasetSettings(python="make.py"), DatasetSettings(seeds=(0, 2500))
    numbers = rows_of_seeds(0, 2500)
    start = [Used("tasks.0.dataset", made, numbers), Used("tasks.1.dataset", seeds, numbers)]
    refuse_other_rows(file, start, run="mine")

    refuse_other_rows(file, start, run="mine")
    with pytest.raises(UserError, match=r"from make.py, need .*; put back what was, seed what is random in its funct"):
        refuse_other_rows(
            file, [Used("tasks.0.dataset", made, numbers.select([*range(1, 2500), 0])), start[1]], run="m"
        )
    with pytest.raises(
        UserError, match=r"tasks.1.dataset: got 2499 rows .* from seeds \(0, 2500\), need the 2500 rows"
    ):
        refuse_other_rows(file, [start[0], Used("tasks.1.dataset", seeds, rows_of_seeds(0, 2499))], run="mine")


def test_rows_to_evaluate_are_held_to_as_far_as_they_are_taken_until_others_are_named(tmp_path: Path) -> None:
    file, data = tmp_path / "rows.json", tmp_path / "data.jsonl"

    def resume(rows: Sequence[object], limit: int = 3, path: Path = data) -> None:
        refuse_other_rows(file, [used(path, rows, setting="eval.dataset", limit=limit)], run="mine")

    resume(ROWS)
    resume(ROWS[:3])
    with pytest.raises(UserError, match=r"^run mine: eval.dataset: got 3 rows .*, need the 3 rows"):
        resume(CHANGED)
    resume(CHANGED, limit=4)
    with pytest.raises(UserError, match=r"^run mine: eval.dataset: got 4 rows .*, need the 4 rows"):
        resume(ROWS, limit=4)
    resume(SWAPPED, path=tmp_path / "others.jsonl")


def test_a_run_of_which_nothing_is_recorded_has_it_recorded(tmp_path: Path) -> None:
    file, data = tmp_path / "rows.json", tmp_path / "data.jsonl"
    file.write_text('{"gsm8k": "an older record, of rows that a function returned"}')

    refuse_other_rows(file, [used(data, ROWS)], run="mine")
    refuse_other_rows(file, [used(data, ROWS, setting="tasks.1.dataset")], run="mine")

    for setting in ("tasks.0.dataset", "tasks.1.dataset"):
        with pytest.raises(UserError, match=f"^run mine: {setting}: got 5 rows"):
            refuse_other_rows(file, [used(data, CHANGED, setting=setting)], run="mine")


def test_a_damaged_record_is_told_and_not_taken_for_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("{")

    with pytest.raises(UserError, match=r"rows.json: cannot be read: .*; remove it, and the rows of now are taken for"):
        refuse_other_rows(file, [used(tmp_path / "data.jsonl", ROWS)], run="mine")
