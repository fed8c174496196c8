"""A folder appears whole or not at all."""

from pathlib import Path

import pytest

from areal_async.trainer.folders import written_whole


def test_the_folder_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "weights" / "1-2"

    with written_whole(target) as partial:
        (partial / "file").write_text("new")
        assert not target.exists()

    assert [path.name for path in target.parent.iterdir()] == ["1-2"]
    assert (target / "file").read_text() == "new"


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "1-2"
    with written_whole(target) as partial:
        (partial / "file").write_text("old")

    with pytest.raises(IsADirectoryError), written_whole(target) as partial:
        partial.write_text("half of the new")

    assert (target / "file").read_text() == "old"


def test_an_older_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "1-2"
    for name in ("old", "new"):
        with written_whole(target) as partial:
            (partial / name).touch()

    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["1-2"]
