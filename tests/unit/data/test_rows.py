"""Rows come from local files and hub names by one call, and what is not there is told in one sentence."""

import json
from pathlib import Path

import pytest

from areal_async.config.reward_model import PairDatasetSettings
from areal_async.config.settings import DatasetSettings
from areal_async.data.rows import check_columns, load_rows
from areal_async.errors import UserError
from areal_async.process.hub import local_model

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the same rows in three formats."""
    import pyarrow as pa
    import pyarrow.parquet

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("question,answer\n1+1?,2\n2+2?,4\n")
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_local_file_gives_its_rows(name: str, folder: Path) -> None:
    rows = load_rows(DatasetSettings(path=str(folder / name)))

    assert [{key: str(value) for key, value in row.items()} for row in rows] == ROWS


def test_a_slice_of_a_split_is_taken(folder: Path) -> None:
    assert len(load_rows(DatasetSettings(path=str(folder / "rows.jsonl"), split="train[:1]"))) == 1


def test_a_directory_gives_its_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    assert list(load_rows(DatasetSettings(path=str(tmp_path)))) == ROWS


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ("nowhere.jsonl", "train", "file nowhere.jsonl is not there"),
        ("/nowhere/at/all", "train", "file /nowhere/at/all is not there"),
        ("rows.jsonl", "test", "Unknown split"),
        ("notes.txt", "train", "need one of .jsonl, .json, .csv, .parquet"),
        ("broken.jsonl", "train", "cannot read .*broken.jsonl"),
    ],
)
def test_a_wrong_path_or_split_is_told_in_one_sentence(path: str, split: str, message: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("not rows")
    (folder / "broken.jsonl").write_text('{"question": "half a')
    local = folder / path

    with pytest.raises(UserError, match=message) as caught:
        load_rows(DatasetSettings(path=str(local) if local.exists() else path, split=split))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "split"),
    [
        ("rows.jsonl", b"", "train"),
        ("rows.jsonl", b"\n\n", "train"),
        ("rows.json", b"[]", "train"),
        ("rows.csv", b"", "train"),
        ("rows.csv", b"question,answer\n", "train"),
        ("rows.jsonl", b'{"question": "1+1?"}\n', "train[:0]"),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_data_set_without_rows_is_told_in_one_sentence(
    name: str, content: bytes, split: str, is_folder: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    path = tmp_path if is_folder else tmp_path / name

    with pytest.raises(UserError) as caught:
        load_rows(DatasetSettings(path=str(path), split=split))

    remedy = f"fill it, or name another split than {split}"
    assert str(caught.value) == f"dataset: {path} has no rows, need at least one; {remedy}"


def test_a_parquet_file_without_rows_is_told_in_one_sentence(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "rows.parquet")

    with pytest.raises(UserError, match="rows.parquet has no rows, need at least one; "):
        load_rows(DatasetSettings(path=str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize("cell", ['"caf\xe9"', '[{"role": "user", "content": "caf\xe9"}]'])
def test_text_that_is_not_utf8_is_told_by_its_row_before_any_row_is_read(cell: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [cell.replace("\xe9", "e")] * 2000 + [cell]
    file.write_bytes("".join(f'{{"id": {n}, "question": {row}}}\n' for n, row in enumerate(rows)).encode("latin-1"))

    with pytest.raises(UserError) as caught:
        load_rows(DatasetSettings(path=str(file)))

    told = f"dataset: {file} row 2000: question has byte 0xe9, need UTF-8; convert the file"
    assert str(caught.value) == told


def test_a_missing_column_is_told_with_those_that_are_there(folder: Path) -> None:
    settings = DatasetSettings(path=str(folder / "rows.jsonl"))

    with pytest.raises(UserError, match=r"has columns \['question', 'answer'\], need 'prompt'"):
        check_columns(load_rows(settings), ("prompt",), settings)


def test_all_missing_columns_are_told_at_once_with_the_settings_that_name_others(folder: Path) -> None:
    settings = PairDatasetSettings(path=str(folder / "rows.jsonl"), rejected="worse")

    with pytest.raises(UserError, match=r"need 'chosen', 'worse'; .* with --dataset.chosen, --dataset.rejected$"):
        check_columns(load_rows(settings), ("question", "chosen", "worse"), settings)


def test_a_hub_name_that_cannot_be_reached_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(UserError, match="dataset: nobody/nothing is neither on this disk nor to be had from the"):
        load_rows(DatasetSettings(path="nobody/nothing"))
    with pytest.raises(UserError, match="model: nobody/nothing is neither on this disk nor to be had from the"):
        local_model("nobody/nothing")


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need one with a config.json"):
        local_model(str(tmp_path))
    (tmp_path / "config.json").touch()

    assert local_model(str(tmp_path)) == tmp_path
