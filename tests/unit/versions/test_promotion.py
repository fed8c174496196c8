"""A tag moves to a version that did not do worse in a comparison, or by force; nothing else moves it."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.comparison import FOLDER, Answer, Comparison, Side, write_result
from areal_async.versions.promotion import Promotion, promote, standing_in


class Run:
    """A run with checkpoints 1-10, 1-20 and 1-30, and comparisons of them."""

    def __init__(self, path: Path) -> None:
        self.path = path / "sums"
        self.num_compared = 0
        for version in ("1-10", "1-20", "1-30"):
            (self.path / "checkpoints" / version).mkdir(parents=True)
            (self.path / "checkpoints" / version / LEDGER).touch()

    def compare(self, a: str, b: str, *, gain: float, run: str = "sums", is_whole: bool = True) -> str:
        """Leave a comparison in which b gets so much more than a in every row."""
        made = Comparison.of(
            Side(name=a, run=run, version=a),
            Side(name=b, run=run, version=b),
            num_samples=1,
            rows={"w": 4},
            question=gain,
        )
        rewards = {"a": 0.5, "b": 0.5 + gain}
        answers = [
            Answer(side=side, task="w", row=row, reward=rewards[side]) for side in ("a", "b") for row in range(4)
        ]
        made = made.with_result(answers) if is_whole else made
        folder = self.path / FOLDER / made.comparison_id
        folder.mkdir(parents=True)
        write_result(folder, made)
        self.num_compared += 1
        os.utime(folder / "comparison.json", (self.num_compared, self.num_compared))
        return made.comparison_id

    def promote(self, version: str | None, **more: Any) -> tags.Tag:
        return promote(self.path, Settings(), Promotion(version=version, by="ada", **more))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_version_that_did_not_do_worse_gets_the_tag_with_the_comparison_behind_it(run: Run) -> None:
    behind = run.compare("1-10", "1-20", gain=0.0)

    tag = run.promote("20", reason="as good, and shorter")

    assert (tag.tag, tag.version, tag.by, tag.why, tag.comparison) == (
        "champion", "1-20", "ada", "as good, and shorter", behind,
    )  # fmt: skip
    assert tags.read(run.path)["champion"] == tag


def test_the_newest_comparison_with_the_version_that_has_the_tag_decides_either_way_round(run: Run) -> None:
    run.promote("1-10", force=True)
    run.compare("1-10", "1-20", gain=-0.1)
    run.compare("1-30", "1-20", gain=0.3)
    with pytest.raises(
        UserError, match=r"1-20 gets -0.1 \(95 % interval -0.1 to -0.1\), need at least \+0 at its low end"
    ):
        run.promote("1-20")
    newest = run.compare("1-20", "1-10", gain=-0.2)

    tag = run.promote("1-20")

    assert (tag.comparison, tag.was) == (newest, "1-10")


def test_one_that_was_not_compared_with_it_is_refused_and_so_is_half_a_comparison(run: Run) -> None:
    with pytest.raises(UserError, match="of 1-20 with any other; compare --run sums --versions OTHER,1-20 makes one"):
        run.promote("1-20")
    run.promote("1-10", force=True)
    run.compare("1-30", "1-20", gain=0.3)
    run.compare("1-10", "1-20", gain=0.3, is_whole=False)
    run.compare("1-10", "1-20", gain=0.4, run="another")
    (run.path / FOLDER / "damaged").mkdir()
    (run.path / FOLDER / "damaged" / "comparison.json").write_text("{")

    with pytest.raises(
        UserError, match="of 1-20 with 1-10, which is champion now; compare --run sums --versions 1-10,1-20"
    ):
        run.promote("1-20")

    assert tags.read(run.path)["champion"].version == "1-10"


def test_force_goes_without_and_a_margin_lets_a_little_worse_pass(run: Run) -> None:
    run.promote("1-10", force=True)
    run.compare("1-10", "1-20", gain=-0.1)

    assert run.promote("1-20", at_least=-0.2).version == "1-20"
    forced = run.promote("1-30", force=True)
    assert (forced.was, forced.is_forced) == ("1-20", True)
    alike = run.compare("1-30", "1-20", gain=0.0)
    for at_least in (0.05, math.nan):
        with pytest.raises(UserError, match="need at least"):
            run.promote("1-20", comparison=alike, at_least=at_least)


def test_the_comparison_that_is_named_decides(run: Run) -> None:
    run.promote("1-10", force=True)
    named = run.compare("1-30", "1-20", gain=0.3)
    run.compare("1-10", "1-20", gain=-0.3)

    assert run.promote("1-20", comparison=named).comparison == named
    with pytest.raises(UserError, match=f"comparison {named} has not compared 1-10 with"):
        run.promote("1-10", comparison=named)
    for nowhere in ("nowhere", "../comparisons/" + named, "/etc"):
        with pytest.raises(UserError, match=r"cannot be read|has not compared"):
            run.promote("1-20", comparison=nowhere)


def test_a_tag_is_taken_away_once(run: Run) -> None:
    run.promote("1-10", tag="candidate", force=True)

    assert run.promote(None, tag="candidate").was == "1-10"
    with pytest.raises(UserError, match="tag candidate: no version has it"):
        run.promote(None, tag="candidate")


def test_only_what_has_a_checkpoint_gets_a_tag_and_no_tag_is_best(run: Run) -> None:
    with pytest.raises(UserError, match="promote: .* has no checkpoint 1-7, need one of 1-10, 1-20, 1-30"):
        run.promote("1-7", force=True)
    with pytest.raises(UserError, match="tag: got best"):
        run.promote("1-10", tag="best", force=True)

    assert not (run.path / "tags.jsonl").exists()


def test_a_tag_that_somebody_moves_meanwhile_is_theirs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tags.read

    def read_and_be_slow(run_directory: Path) -> dict[str, tags.Tag]:
        found = held(run_directory)
        monkeypatch.setattr(tags, "read", held)
        run.promote("1-30", force=True)
        return found

    monkeypatch.setattr(tags, "read", read_and_be_slow)

    with pytest.raises(UserError, match="tag champion: somebody has just moved it"):
        run.promote("1-20", force=True)

    assert tags.read(run.path)["champion"].version == "1-30"


@pytest.mark.parametrize("settings", [({}, {"temperature": "1"}), ({"temperature": "1"}, {"temperature": "0"})])
def test_a_comparison_of_settings_says_nothing_of_a_version(settings: tuple[dict[str, str], dict[str, str]]) -> None:
    for versions in (("1-1", "1-2"), ("1-2", "1-2")):
        sides = [
            Side(name=one, run="r", version=one, settings=given) for one, given in zip(versions, settings, strict=True)
        ]
        made = Comparison.of(*sides, num_samples=1, rows={"w": 2}, question=0)
        answers = [Answer(side=side, task="w", row=row, reward=1.0) for side in ("a", "b") for row in range(2)]

        assert standing_in(made.with_result(answers), Version(1, 2), "r") is None


def test_a_comparison_without_an_interval_says_nothing() -> None:
    made = Comparison.of(
        Side(name="a", run="r", version="1-1"),
        Side(name="b", run="r", version="1-2"),
        num_samples=1,
        rows={"w": 1},
        question=0,
    )
    answers = [Answer(side="a", task="w", row=0, reward=0.0), Answer(side="b", task="w", row=0, reward=1.0)]

    assert standing_in(made.with_result(answers), Version(1, 2), "r") is None
