"""What is kept of a run is listed with all that is known of it, and nothing goes that anybody needs."""

import fcntl
import json
from pathlib import Path

import pytest

from areal_async.process.atomic_folders import LEDGER, held
from areal_async.protocol.types import Version
from areal_async.versions import registry, tags
from areal_async.versions.registry import ABANDONED, UNTAGGED, Deletable
from areal_async.versions.tags import Tag


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two lineages: the first one's steps 21 to 30 were given up."""
    directory = tmp_path / "sums"
    for version in ("1-10", "1-20", "1-30", "2-30", "2-40"):
        _fill(directory / "checkpoints" / version / LEDGER, 100)
    for version in ("1-0", "2-39", "2-40"):
        _fill(directory / "weights" / version / "model.safetensors", 10)
    _fill(directory / "model" / "model.safetensors", 1)
    _fill(directory / "model_1-20" / "model.safetensors", 2)
    made = [f"1-{step}" for step in range(1, 21)] + [f"2-{step}" for step in range(21, 41)]
    lines = [{"step": Version.parse(one).step, "weights_version": one, "reward_mean": 0.5} for one in made]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluated = [
        {"eval_id": "2-30", "accuracy": accuracy, "workflow": name} for name, accuracy in (("a", 0.4), ("b", 0.6))
    ]
    (directory / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluated))
    (directory / "config.yaml").write_text("run: {name: sums}\n")
    (directory / "rows.json").write_text('{"eval.dataset": {"sha256": "ab"}, "of before": "cd"}')
    (directory / "code.json").write_text('{"sums.py": "ef"}')
    tags.write(directory, Tag(tag="champion", version="1-10"))
    return directory


def _fill(file: Path, num_bytes: int) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * num_bytes)


def _names(run: Path, found: list[Deletable]) -> list[str]:
    return [str(one.path.relative_to(run)) for one in found]


def test_each_version_stands_once_with_all_that_is_known_of_it(run: Path) -> None:
    kept = {one.version: one for one in registry.kept(run)}

    assert list(kept) == ["1-0", "1-10", "1-20", "1-30", "2-30", "2-39", "2-40"]
    assert {name: (one.kinds, one.num_bytes) for name, one in kept.items() if len(one.kinds) > 1} == {
        "1-20": (["checkpoint", "model"], 102),
        "2-40": (["checkpoint", "weights", "model"], 111),
    }
    assert (kept["1-10"].tags, kept["2-40"].tags) == (["champion"], [])
    assert (kept["1-30"].parent, kept["2-30"].parent, kept["2-30"].lineage) == ("", "1-20", 2)
    assert (kept["2-30"].accuracy, kept["2-40"].accuracy) == (0.5, None)
    assert (kept["2-40"].run, kept["2-40"].data, kept["2-40"].code) == (
        "sums",
        {"eval.dataset": "ab"},
        {"sums.py": "ef"},
    )
    assert kept["2-40"].settings == kept["1-0"].settings != ""
    assert registry.runs_in(run.parent) == [run]


def test_what_is_not_recorded_is_left_out(run: Path) -> None:
    for name in ("rows.json", "code.json", "metrics.jsonl", "eval.jsonl", "tags.jsonl"):
        (run / name).unlink()

    (one,) = [one for one in registry.kept(run) if one.version == "2-30"]

    assert (one.tags, one.parent, one.accuracy, one.data, one.code) == ([], "", None, {}, {})
    assert registry.short_hash(one.data) == ""


def test_what_has_no_tag_goes_but_the_newest_and_what_is_needed(run: Path) -> None:
    found = registry.deletable(run, UNTAGGED, keep_newest=1, needed={Version(1, 30)})

    assert _names(run, found) == ["checkpoints/1-20", "checkpoints/2-30", "weights/1-0", "weights/2-39"]
    assert [one.num_bytes for one in found] == [100, 100, 10, 10]
    more = registry.deletable(run, UNTAGGED, keep_newest=2, needed=())
    assert _names(run, more) == ["checkpoints/1-20", "checkpoints/1-30", "weights/1-0"]


def test_what_the_run_did_not_go_on_from_is_abandoned(run: Path) -> None:
    assert _names(run, registry.deletable(run, ABANDONED, keep_newest=1, needed=())) == ["checkpoints/1-30"]
    (run / "metrics.jsonl").unlink()
    assert registry.deletable(run, ABANDONED, keep_newest=1, needed=()) == [], "nothing tells"


def test_the_best_and_what_is_being_read_stay(run: Path) -> None:
    (run / "checkpoints" / "best").symlink_to("2-30")
    with held(run / "checkpoints" / "1-20", LEDGER):
        assert _names(run, registry.deletable(run, UNTAGGED, keep_newest=3, needed=())) == []
        assert _names(run, registry.deletable(run, UNTAGGED, keep_newest=1, needed=())) == [
            "checkpoints/1-30", "weights/1-0", "weights/2-39",
        ]  # fmt: skip


def test_what_is_held_or_gets_a_tag_meanwhile_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = registry.deletable(run, UNTAGGED, keep_newest=1, needed=())[:3]
    with held(first.path, LEDGER):
        assert not registry.remove(run, first)
    tags.write(run, Tag(tag="candidate", version=second.path.name))
    assert not registry.remove(run, second)

    assert registry.remove(run, third)

    assert [path.is_dir() for path in (first.path, second.path, third.path)] == [True, True, False]
    assert not list(run.glob("checkpoints/.*")), "nothing is left of it"
    with third.path.parent.joinpath("1-20", LEDGER).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what was asked holds nothing
