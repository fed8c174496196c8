"""What an arm has come to is told alike by status, top, the summary, curves and Prometheus."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_async.cli import arm as verb
from areal_async.cli.main import main
from areal_async.config.settings import ArmSettings, InferenceSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.monitor.boards import BoardWriter
from areal_async.monitor.report.page import render as render_page
from areal_async.monitor.report.summary import summarise
from areal_async.monitor.snapshot import Status, arms_of
from areal_async.monitor.status_screen import render
from areal_async.monitor.top.head import head_lines
from areal_async.monitor.top.view import TopView
from areal_async.protocol.arms import Arm, Arms, ArmState, OpenPrompt, summary
from areal_async.protocol.types import Version
from areal_async.telemetry.exporters.samples import samples
from areal_async.versions.arms import arm_text, comparison_of, remove_unserved
from areal_async.versions.comparison import read_result, write_result
from areal_async.versions.promotion import standing_in
from tests.unit.cli.reports import report

ARM = Arm(name="old", arm_id="old-1", version="1-4", path="/arms/old", share=0.1, first_admission=0, first_position=0)
STATE = ArmState(
    arm_id="old-1", num_asked=13, open=[OpenPrompt(3)], levels={"-100": 1, "0": 5, "100": 4}, low=-0.125, high=0.5,
    pinned_total=7.0, newest_total=4.0, num_wins=4, num_losses=1, num_failed=2, last_failure="it broke",
    oldest="1-5", newest="1-9",
)  # fmt: skip
SUMMARY = summary(ARM, STATE)
TEXT = "1-4: not told apart, +0.300 (-0.125 to +0.500, 10 pairs with 1-5 to 1-9); 13 asked at share 0.1, 2 failed"


def test_it_is_told_in_one_line_before_and_after_it_is_told_apart() -> None:
    assert arm_text(SUMMARY) == f"{TEXT} (it broke)"
    better = SUMMARY | {"decided_at": 9, "low": 0.01, "num_failed": 0}
    assert arm_text(better).startswith("1-4: better by 0.300 (+0.010 to +0.500, 10 pairs")
    worse = SUMMARY | {"decided_at": 9, "difference": -0.3, "low": -0.5, "high": -0.01}
    assert arm_text(worse).startswith("1-4: worse by 0.300 (-0.500 to -0.010, 10 pairs")
    none = summary(ARM, ArmState(arm_id="old-1"))
    assert arm_text(none) == "1-4: no pair yet; 0 asked at share 0.1"
    assert (none["difference"], none["low"], none["high"]) == (None, None, None)


def test_the_status_has_each_arm_with_the_nodes_that_cannot_serve_it() -> None:
    other = Arm(name="new", arm_id="new-2", path="m", share=0.5, first_admission=0, first_position=0)
    records = {
        "arms": Arms(by_name={"old": ARM, "new": other}),
        "arm.old": STATE,
        "arm.new": ArmState(arm_id="new-1", num_asked=7),
    }
    reports: dict[tuple[str, str], dict[str, Any]] = {
        ("node", "0"): {"arms": {"new": "no GPU of this node is free"}},
        ("node", "1"): {"arms": "nonsense"},
        ("controller", "0"): {"arms": {"new": {}}},
    }

    found = arms_of(records, reports)

    assert found["old"]["num_pairs"] == 10
    assert found["new"]["num_asked"] == 0, "what an earlier arm of that name has come to is none of it"
    assert found["new"]["not_served"] == {"0": "no GPU of this node is free"}
    status = Status(
        run="g", state="running", reason="", step=1, steps=2, weights_version="1-9", reward_mean=0.5, accuracy=None,
        members=[], arms=found,
    )  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO(), highlight=False)
    console.print(*render(status), sep="\n")
    assert TEXT in console.export_text()
    view = TopView()
    view.status = status
    assert any(line.plain.startswith(f"arm old   {TEXT}") for line in head_lines(view, 200))


def test_it_has_curves_and_a_line_when_the_run_has_ended(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(name="seen", directory=tmp_path))
    directory = tmp_path / "seen"
    directory.mkdir()
    step = {"step": 1, "weights_version": "1-1", "reward_mean": 0.5, "time_step_s": 1.0, "num_tokens": 1}
    (directory / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    lines = [{"step": 4, "name": "old", **SUMMARY}, {"step": 6, "name": "old", **SUMMARY, "difference": 0.25}]
    (directory / "arms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    BoardWriter(settings).close()

    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    curves = {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert curves["arm/old/difference"] == [(4, pytest.approx(0.3)), (6, 0.25)]
    assert {f"arm/old/{name}" for name in ("difference", "low", "high", "num_pairs")} <= curves.keys()
    assert f"arm old {TEXT} (it broke)".replace("+0.300", "+0.250") in summarise(settings)
    page = render_page(dataclasses.replace(report(), arms=lines), refresh_s=None)
    assert "<h3>Arm old" in page
    assert "2 failed (it broke)" in page


def test_it_is_a_comparison_that_keeps_its_name_however_many_pairs_there_are(tmp_path: Path) -> None:
    made = comparison_of(ARM, STATE, run="seen")
    earlier = comparison_of(ARM, ArmState(arm_id="old-1", newest="1-5"), run="seen")
    another = comparison_of(msgspec.structs.replace(ARM, arm_id="old-2"), STATE, run="seen")

    write_result(tmp_path / made.comparison_id, made)

    assert read_result(tmp_path / made.comparison_id) == made
    assert earlier.comparison_id == made.comparison_id != another.comparison_id
    assert (made.a.name, made.a.version, made.b.version, made.b.run) == ("seen 1-5 to 1-9", "", "1-4", "seen")
    standing = standing_in(made, Version(1, 4), "seen")
    assert standing is not None
    assert (standing.comparison_id, standing.low) == (made.comparison_id, -0.125), "promote can go by it"
    assert standing_in(made, Version(1, 9), "seen") is None, "it was one of several"
    single = comparison_of(ARM, msgspec.structs.replace(STATE, oldest="1-9"), run="seen")
    assert (single.a.name, single.a.version) == ("seen 1-9", "1-9")
    overall = made.overall
    assert overall is not None
    assert (overall.difference, overall.low, overall.high) == (pytest.approx(0.3), -0.125, 0.5)
    assert (overall.wins, overall.ties, overall.losses, overall.num_left_out) == (4, 5, 1, 2)
    assert (overall.a.accuracy, overall.b.accuracy, overall.b.is_graded) == (0.4, 0.7, False)
    careful = standing_in(
        comparison_of(msgspec.structs.replace(ARM, alpha=0.01), STATE, run="seen"), Version(1, 4), "seen"
    )
    assert careful is not None
    assert careful.alpha == 0.01
    folder = comparison_of(msgspec.structs.replace(ARM, version="", path="/models/other"), STATE, run="seen")
    assert (folder.b.model, folder.b.run, folder.b.version) == ("/models/other", "", "")


def test_models_that_nobody_is_to_serve_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    remove_unserved(tmp_path, Arms())
    for name in ("old-1-4", "compare_1_a", "half.partial"):
        (tmp_path / "arms" / name).mkdir(parents=True)
    kept = msgspec.structs.replace(ARM, path=str(tmp_path / "arms" / "old-1-4"))

    remove_unserved(tmp_path, Arms(by_name={"old": kept}, compared={"c": ARM}))

    assert [path.name for path in (tmp_path / "arms").iterdir()] == ["old-1-4"]


def test_prometheus_has_its_numbers_under_its_name() -> None:
    found = {one.name: one for one in samples("controller", {"arms": {"old": SUMMARY}})}

    assert found["areal_arm_difference"].labels == {"arm": "old"}
    assert {name: one.value for name, one in found.items()} == {
        "areal_arm_difference": pytest.approx(0.3),
        "areal_arm_difference_low": -0.125,
        "areal_arm_difference_high": 0.5,
        "areal_arm_prompts_total": 13,
        "areal_arm_pairs_total": 10,
        "areal_arm_failed_total": 2,
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["add", "--version", "1-4", "--model", "m"], "need either --version of the run or --model"),
        (["add", "old"], "need either --version of the run or --model"),
        (["list", "old"], "arm list: got old, need no name"),
        (["remove"], "arm remove: got None, need the name of an arm"),
        (["remove", "old", "--share", "0.2"], "arm remove: got --share, need none; it is for arm add"),
        (["add", "--version", "1-4", "--share", "3"], "--share: got 3, need 1e-06 to 1"),
        (["add", "--version", "1-4", "--alpha", "nan"], "--alpha: got nan, need a number between 0 and 1"),
        (["add", "--version", "1-4", "--reach", "0"], "--reach: got 0, need more than 0, at most"),
        (["add", "1-4", "--version", "1-4"], "arm: got the name '1-4', need up to 48 letters"),
        (["add", "--model", "/not/there"], "--model: no folder /not/there; give a model's folder or a hub name"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: g}\n")

    assert main(["arm", *words, "--run", str(tmp_path)]) == UserError.exit_code
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"), [("1-40", "v1_40"), ("champion", "champion"), ("Qwen2.5-1.5B", "Qwen2_5_1_5B"), ("-x-", "x")]
)
def test_an_arm_without_a_name_gets_one(text: str, name: str) -> None:
    assert verb._name_of(text) == name


def test_a_version_of_which_no_name_can_be_made_needs_one() -> None:
    with pytest.raises(UserError, match="no name can be made of ..., need one|no name can be made of"):
        verb._name_of("...")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"arms": {"1-4": ArmSettings(path="m")}}, "arms: got the name '1-4', need up to 48 letters"),
        ({"arms": {f"a{number}": ArmSettings(path="m") for number in range(9)}}, "arms: got 9, need at most 8"),
        (
            {"arms": {"old": ArmSettings(path="m")}, "inference": InferenceSettings(colocate="split")},
            "arms.old: got an arm with inference.colocate=split, need none",
        ),
    ],
)
def test_settings_of_arms_that_no_node_could_serve_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match="arms") as caught:
        Settings(**given)
    assert why in str(caught.value)
