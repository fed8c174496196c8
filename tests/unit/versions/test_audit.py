"""The audit trail has every start, order, change of a setting and tag, in the order of time."""

from pathlib import Path

from areal_async.config.change_record import record_change
from areal_async.protocol.events import RunOrdered, SettingChanged
from areal_async.versions import audit, tags
from areal_async.versions.tags import Tag


def _at(minute: int) -> str:
    return f"2026-11-27T10:{minute:02}:00.000+00:00"


def test_who_did_what_and_why_is_one_table(tmp_path: Path) -> None:
    record_change(tmp_path, RunOrdered(order="start", by="ada", reason="", at=_at(1)))
    tags.write(tmp_path, Tag(tag="champion", version="1-20", by="gate", why="better", comparison="c", at=_at(4)))
    tags.write(tmp_path, Tag(tag="champion", version="", by="ada", why="worse", at=_at(6)))
    record_change(
        tmp_path, SettingChanged(setting="trainer.lr", before=1e-6, after=2e-6, by="bob", reason="slow", at=_at(2))
    )
    record_change(tmp_path, RunOrdered(order="stop", by="bob", reason="lunch", at=_at(5)))
    tags.write(tmp_path, Tag(tag="champion", version="1-9", by="ada", why="I know", is_forced=True, at=_at(7)))

    assert audit.read(tmp_path) == [
        (_at(1), "ada", "start", ""),
        (_at(2), "bob", "set trainer.lr: 1e-06 -> 2e-06", "slow"),
        (_at(4), "gate", "tag champion: none -> 1-20 by comparison c", "better"),
        (_at(5), "bob", "stop", "lunch"),
        (_at(6), "ada", "tag champion: 1-20 -> none", "worse"),
        (_at(7), "ada", "tag champion: none -> 1-9 by force", "I know"),
    ]


def test_a_run_to_which_nobody_did_anything_has_an_empty_one(tmp_path: Path) -> None:
    assert audit.read(tmp_path) == []
    (tmp_path / "orders.jsonl").write_text('{"order": "pause"}\n[1]\n{"or')

    assert audit.read(tmp_path) == [("", "", "pause", "")], "what is left out, and what a power cut left"
