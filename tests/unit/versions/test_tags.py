"""Tags: the newest line holds, one writer at a time, through a power cut, and only names that can be no version."""

import fcntl
import multiprocessing
from pathlib import Path

import pytest

from areal_async.errors import UserError
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.tags import Tag


def _tag(run: Path, version: str, tag: str = "champion", over: str | None = None) -> Tag | None:
    return tags.write(run, Tag(tag=tag, version=version, by="ada", why="good", comparison="c"), over=over)


def test_the_newest_line_of_a_tag_holds_and_says_what_was(tmp_path: Path) -> None:
    assert tags.read(tmp_path) == {}
    _tag(tmp_path, "1-10")
    _tag(tmp_path, "1-20", "candidate")
    written = _tag(tmp_path, "1-20")

    held = tags.read(tmp_path)

    assert held["champion"] == written
    assert (held["champion"].was, held["champion"].by, held["champion"].why) == ("1-10", "ada", "good")
    assert tags.tagged(tmp_path) == {Version(1, 20)}
    assert [line.version for line in tags.history(tmp_path)] == ["1-10", "1-20", "1-20"]


def test_a_line_without_a_version_takes_the_tag_away(tmp_path: Path) -> None:
    _tag(tmp_path, "1-10")
    written = _tag(tmp_path, "")

    assert written is not None
    assert written.was == "1-10"
    assert tags.read(tmp_path) == {}


def test_a_tag_moves_only_from_where_it_is_thought_to_be(tmp_path: Path) -> None:
    assert _tag(tmp_path, "1-10", over="1-5") is None
    assert tags.read(tmp_path) == {}
    assert _tag(tmp_path, "1-10", over="") is not None
    assert _tag(tmp_path, "1-20", over="") is None

    assert tags.read(tmp_path)["champion"].version == "1-10"


def test_a_last_line_that_a_power_cut_left_says_nothing_and_is_mended(tmp_path: Path) -> None:
    _tag(tmp_path, "1-10")
    path = tmp_path / "tags.jsonl"
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:30], b"\0" * 600):
        path.write_bytes(whole + torn)
        assert tags.read(tmp_path)["champion"].version == "1-10"

        written = _tag(tmp_path, "1-20")

        assert written is not None
        assert written.was == "1-10"
        assert [line.version for line in tags.history(tmp_path)] == ["1-10", "1-20"]
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "line", [b"{}", b'{"tag": "best!", "version": "1-2"}', b'{"tag": "a", "version": "2"}', b"[1]", b"\xff"]
)
def test_a_damaged_file_is_said_to_be_and_where(tmp_path: Path, line: bytes) -> None:
    _tag(tmp_path, "1-10")
    with (tmp_path / "tags.jsonl").open("ab") as file:
        file.write(line + b"\n")

    with pytest.raises(UserError, match=r"tags.jsonl: line 2 is no tag: .*; correct the file"):
        tags.read(tmp_path)
    with pytest.raises(UserError, match=r"line 2 is no tag"):
        _tag(tmp_path, "1-20")


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "tags.jsonl").write_bytes(b"x" * (1 << 20))

    with pytest.raises(UserError, match=r"line 1 is too long for a tag"):
        tags.read(tmp_path)


@pytest.mark.parametrize("name", ["best", "last", "1-20", "20", "Champion", "-a", "a b", "", "a" * 65, "é", "a\n"])
def test_a_name_that_means_something_else_or_could_be_a_version_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="^tag: got "):
        _tag(tmp_path, "1-10", name)

    assert not (tmp_path / "tags.jsonl").exists()


def test_there_are_not_so_many_tags_that_nobody_can_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "MAX_TAGS", 2)
    _tag(tmp_path, "1-10", "a")
    _tag(tmp_path, "1-10", "b")

    with pytest.raises(UserError, match="tag c: the run has 2 already"):
        _tag(tmp_path, "1-10", "c")

    assert _tag(tmp_path, "1-20", "b") is not None


def test_who_holds_the_file_for_too_long_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "LOCK_DEADLINE_S", 0.05)
    with (tmp_path / "tags.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(UserError, match="another process has held it for 0.05 s"):
            _tag(tmp_path, "1-10")


def test_a_run_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        _tag(tmp_path / "nowhere", "1-10")


def _write_many(run: Path, name: str) -> None:
    for step in range(20):
        _tag(run, f"1-{step}", name)


def test_several_processes_write_and_no_line_is_lost(tmp_path: Path) -> None:
    writers = [multiprocessing.Process(target=_write_many, args=(tmp_path, name)) for name in ("a", "b", "c")]
    for one in writers:
        one.start()
    for one in writers:
        one.join()

    lines = list(tags.history(tmp_path))

    assert len(lines) == 60
    for name in ("a", "b", "c"):
        own = [line for line in lines if line.tag == name]
        assert [line.version for line in own] == [f"1-{step}" for step in range(20)]
        assert [line.was for line in own] == ["", *(f"1-{step}" for step in range(19))]
