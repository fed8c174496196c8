"""What a person types for a version; the checkpoint that is meant is held until it is read, or it is the next one."""

import fcntl
import json
from pathlib import Path

import pytest

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, keep_newest
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.resolve import kept, resolve
from areal_async.versions.tags import LAST, Tag


def _make(checkpoints: Path, *versions: str) -> None:
    for version in versions:
        (checkpoints / version).mkdir(parents=True)
        (checkpoints / version / LEDGER).write_text("{}")


def _trained(run: Path, *versions: str) -> None:
    lines = [{"step": Version.parse(one).step, "weights_version": one, "reward_mean": 0.5} for one in versions]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_version_a_step_a_tag_the_best_and_the_last_are_found(tmp_path: Path) -> None:
    _make(tmp_path / "checkpoints", "1-10", "1-20", "2-20", "2-30")
    _trained(tmp_path, *(f"1-{step}" for step in range(1, 11)), *(f"2-{step}" for step in range(11, 31)))
    tags.write(tmp_path, Tag(tag="champion", version="1-20"))

    found = {wanted: str(resolve(tmp_path, Settings(), wanted)) for wanted in ("1-10", "01-020", "20", "champion")}

    assert found == {"1-10": "1-10", "01-020": "1-20", "20": "2-20", "champion": "1-20"}
    assert str(resolve(tmp_path, Settings(), "last")) == "2-30"
    assert str(resolve(tmp_path, Settings(), "best")) == "2-30", "all rewards are alike"


def test_a_step_is_of_the_lineage_that_survives_and_of_no_other(tmp_path: Path) -> None:
    _make(tmp_path / "checkpoints", "1-10", "2-10", "1-20")
    _trained(tmp_path, "1-10", "2-20")

    assert str(resolve(tmp_path, Settings(), "10")) == "1-10", "the second lineage began from it"
    with pytest.raises(UserError, match="has no checkpoint 20, need one of 1-10, 1-20, 2-10, best, last"):
        resolve(tmp_path, Settings(), "20")
    (tmp_path / "metrics.jsonl").unlink()
    assert str(resolve(tmp_path, Settings(), "10")) == "2-10", "nothing tells"


@pytest.mark.parametrize("wanted", ["1-30", "30", "best", "champion", "", "x" * 500, "9" * 5000, "٣"])
def test_what_is_not_there_is_refused_in_one_sentence_that_lists_what_is(tmp_path: Path, wanted: str) -> None:
    _make(tmp_path / "checkpoints", "1-10")
    tags.write(tmp_path, Tag(tag="kept", version="1-10"))
    tags.write(tmp_path, Tag(tag="gone", version="1-5"))

    with pytest.raises(
        UserError, match=r"^--at: \S+ has no checkpoint .*, need one of 1-10, best, last, kept$"
    ) as told:
        resolve(tmp_path, Settings(), wanted, option="--at")

    assert len(str(told.value)) < 400


def test_a_tag_says_which_version_it_has_that_is_not_there(tmp_path: Path) -> None:
    tags.write(tmp_path, Tag(tag="champion", version="1-5"))

    with pytest.raises(UserError, match="has no checkpoint champion, which is 1-5, need one of none"):
        resolve(tmp_path, Settings(), "champion")


def test_of_many_checkpoints_the_newest_are_listed(tmp_path: Path) -> None:
    _make(tmp_path / "checkpoints", *(f"1-{step}" for step in range(1, 101)))

    with pytest.raises(UserError, match="need one of 80 older ones, 1-81, .*, 1-100, best, last"):
        resolve(tmp_path, Settings(), "7-7")


def test_other_versions_do_where_that_is_said(tmp_path: Path) -> None:
    evaluated = {Version(1, 5), Version(1, 15)}

    assert resolve(tmp_path, Settings(), "15", among=evaluated) == Version(1, 15)
    assert resolve(tmp_path, Settings(), "last", among=evaluated) == Version(1, 15)
    with pytest.raises(UserError, match="has no version 1-7, need one of 1-5, 1-15"):
        resolve(tmp_path, Settings(), "1-7", among=evaluated)


def test_what_is_chosen_stays_though_its_run_goes_on(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    _make(checkpoints, "1-2", "1-4")

    with kept(tmp_path, Settings(), LAST) as version:
        _make(checkpoints, "1-6")
        keep_newest(checkpoints, 1, lease=LEDGER)
        assert version == Version(1, 4)
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

    with kept(tmp_path, Settings(), LAST) as version:
        assert version == Version(1, 4)
    monkeypatch.setattr("fcntl.flock", after_a_step)
    (checkpoints / "1-4").rename(checkpoints / "1-2")
    with pytest.raises(UserError, match=r"has no checkpoint 1-2, need one of 1-4"), kept(tmp_path, Settings(), "1-2"):
        pass


def test_what_is_no_checkpoint_is_left_to_who_reads_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "1-2").mkdir(parents=True)

    with kept(tmp_path, Settings(), LAST) as version:
        assert version == Version(1, 2)
    with pytest.raises(UserError, match="has no checkpoint 1-3, need one of 1-2"), kept(tmp_path, Settings(), "1-3"):
        pass
