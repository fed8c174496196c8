"""The checkpoint that is meant is held until it is read, or it is the next one."""

import fcntl
from pathlib import Path

import pytest

from areal_async.cli.export import LAST, chosen
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, keep_newest


def _make(checkpoints: Path, *versions: str) -> None:
    for version in versions:
        (checkpoints / version).mkdir(parents=True)
        (checkpoints / version / LEDGER).write_text("{}")


def test_what_is_chosen_stays_though_its_run_goes_on(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    _make(checkpoints, "1-2", "1-4")

    with chosen(tmp_path, Settings(), LAST) as version:
        _make(checkpoints, "1-6")
        keep_newest(checkpoints, 1, lease=LEDGER)
        assert version == "1-4"
        assert (checkpoints / "1-4").is_dir()

    keep_newest(checkpoints, 1, lease=LEDGER)
    assert [path.name for path in checkpoints.iterdir()] == ["1-6"]


def test_of_one_that_goes_before_it_is_held_the_next_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    _make(checkpoints, "1-2")
    lock = fcntl.flock

    def after_a_step(file: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        _make(checkpoints, "1-4")
        keep_newest(checkpoints, 1, lease=LEDGER)
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", after_a_step)

    with chosen(tmp_path, Settings(), LAST) as version:
        assert version == "1-4"
    monkeypatch.setattr("fcntl.flock", after_a_step)
    (checkpoints / "1-4").rename(checkpoints / "1-2")
    with pytest.raises(UserError, match=r"has no checkpoint 1-2, need one of 1-4"), chosen(tmp_path, Settings(), "1-2"):
        pass


def test_what_is_no_checkpoint_is_left_to_who_reads_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "1-2").mkdir(parents=True)

    with chosen(tmp_path, Settings(), LAST) as version:
        assert version == "1-2"
    with pytest.raises(UserError, match="has no checkpoint 1-3, need one of 1-2"), chosen(tmp_path, Settings(), "1-3"):
        pass
