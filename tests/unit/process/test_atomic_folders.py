"""A folder appears whole or not at all, and stays while somebody reads it."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.process.atomic_folders import LEDGER, held, keep_newest, written_whole


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
    assert [path.name for path in tmp_path.iterdir()] == ["1-2"]


def test_an_older_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "1-2"
    for name in ("old", "new"):
        with written_whole(target) as partial:
            (partial / name).touch()

    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["1-2"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three of them."""
    for step in (1, 2, 3):
        (tmp_path / f"1-{step}").mkdir()
        (tmp_path / f"1-{step}" / LEDGER).write_text("{}")
    return tmp_path


def test_a_folder_that_was_put_elsewhere_and_linked_is_deleted_by_its_link(checkpoints: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    for name in ("1-1", ".1-0.replaced"):
        (elsewhere / name).mkdir(parents=True, exist_ok=True)
        (elsewhere / name / LEDGER).write_text("{}")
    shutil.rmtree(checkpoints / "1-1")
    for name in ("1-1", ".1-0.replaced"):
        (checkpoints / name).symlink_to(elsewhere / name)

    for _ in range(2):
        keep_newest(checkpoints, 2, lease=LEDGER)

    assert _names(checkpoints) == ["1-2", "1-3", "disk"]
    assert _names(elsewhere) == [".1-0.replaced", "1-1"]


def test_a_file_with_a_folders_name_is_deleted_as_one(checkpoints: Path) -> None:
    for name in ("1-0", ".1-4.partial"):
        (checkpoints / name).write_text("")

    keep_newest(checkpoints, 3, lease=LEDGER)

    assert _names(checkpoints) == ["1-1", "1-2", "1-3"]


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_somebody_reads_is_deleted_when_he_has_read_it(checkpoints: Path) -> None:
    with held(checkpoints / "1-1", LEDGER) as is_there, held(checkpoints / "1-1", LEDGER) as is_there_for_another:
        assert is_there
        assert is_there_for_another
        keep_newest(checkpoints, 1, lease=LEDGER)
        assert _names(checkpoints) == ["1-1", "1-3"]

    keep_newest(checkpoints, 1, lease=LEDGER)
    assert _names(checkpoints) == ["1-3"]


def test_a_reader_that_was_killed_holds_nothing(checkpoints: Path) -> None:
    code = (
        "import sys, pathlib; from areal_async.process.atomic_folders import held\n"
        f"with held(pathlib.Path({str(checkpoints / '1-1')!r}), {LEDGER!r}): print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        keep_newest(checkpoints, 1, lease=LEDGER)
        assert _names(checkpoints) == ["1-1", "1-3"]
        reader.kill()

    keep_newest(checkpoints, 1, lease=LEDGER)
    assert _names(checkpoints) == ["1-3"]


def test_what_is_being_deleted_is_not_there(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    rename, delete = Path.rename, shutil.rmtree

    def look() -> None:
        with held(checkpoints / "1-1", LEDGER) as is_there:
            seen.append(is_there)

    def renaming(path: Path, target: Path) -> Path:
        look()
        return rename(path, target)

    def deleting(path: Path) -> None:
        look()
        delete(path)

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", deleting)

    keep_newest(checkpoints, 2, lease=LEDGER)

    assert seen == [False, False]
    assert _names(checkpoints) == ["1-2", "1-3"]


def test_who_comes_too_late_for_a_folder_finds_none(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def after_the_deletion(file: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        keep_newest(checkpoints, 1, lease=LEDGER)  # it is open, and not locked yet
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", after_the_deletion)

    with held(checkpoints / "1-2", LEDGER) as is_there:
        assert not is_there
