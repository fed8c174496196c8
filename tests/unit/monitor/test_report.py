"""The report tells the numbers of its run, in one file that fetches nothing and runs nothing that a model wrote."""

import dataclasses
import json
import math
import re
import threading
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path

import anyio
import pytest

from areal_async.bus import declare
from areal_async.cli.main import main
from areal_async.config.settings import ModelSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.output import replacing
from areal_async.monitor.report.charts import Series, bars, line_chart, number_text, stacked_bars, step_ticks, ticks
from areal_async.monitor.report.data import ReportTrajectory, choose_samples, count_ages
from areal_async.monitor.report.page import render
from areal_async.monitor.report.write import write_report
from areal_async.monitor.token_views import IdDetokenizer
from areal_async.trainer.output.archive_reader import read_recorded
from tests.unit.cli.reports import HOSTILE, report
from tests.unit.trainer.archives import archive_step, line, write_lines


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _run(directory: Path) -> RunDirectory:
    """Return a run without a step, whose broker was never started."""
    run = RunDirectory(directory / "made")
    run.write_settings(
        Settings(run=RunSettings(name="made", directory=directory), model=ModelSettings(path=str(directory / "none")))
    )
    return run


def _told(svg: str) -> dict[str, list[object]]:
    (chart,) = [attributes["data-chart"] for tag, attributes in _Page(svg).tags if tag == "svg"]
    told: dict[str, list[object]] = json.loads(chart or "")
    return told


def test_a_page_is_whole_without_a_network() -> None:
    text = render(report())

    page = _Page(text)
    assert not [tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys()]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    assert sum(tag == "script" for tag, _ in page.tags) == 1


def test_what_a_model_wrote_is_text_and_never_markup() -> None:
    page = _Page(render(report()))

    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert HOSTILE in page.text


def test_a_page_names_the_version_that_has_a_tag() -> None:
    assert "1-100is champion" in _Page(render(report())).text


def test_a_page_looks_at_its_file_only_when_it_is_watched_and_is_loaded_again_where_no_script_runs() -> None:
    assert "iframe" not in render(report())
    assert "http-equiv" not in render(report())
    watched = render(report(), refresh_s=0.5)
    assert "LOOK_MS = 500;" in watched
    assert '<noscript><meta http-equiv="refresh" content="1"></noscript>' in watched


def test_a_page_of_ten_thousand_steps_with_long_samples_is_bounded() -> None:
    long = report(num_steps=10_000)
    many = [ReportTrajectory(one.what, one.entry, [one.sequences[0] * 5000] * 3) for one in long.samples]

    text = render(dataclasses.replace(long, samples=many))

    assert len(text) < 6e6, "bytes of the page"


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_report_too(num_steps: int) -> None:
    assert f"step {num_steps} of 200" in _Page(render(report(num_steps=num_steps))).text


def test_a_line_tells_its_values_and_breaks_where_there_is_none() -> None:
    svg = line_chart([1, 2, 3, 4], [Series("loss", [0.5, math.nan, None, 0.25])], unit="nats")

    told = _told(svg)
    assert told["series"][0]["text"] == ["0.5", None, None, "0.25"]  # type: ignore[index]
    (path,) = re.findall(r'class="l1" d="([^"]*)"', svg)
    assert path.count("M") == 2
    assert "nan" not in svg.lower()


def test_a_line_is_higher_where_its_value_is_larger() -> None:
    told = _told(line_chart([1, 2], [Series("reward", [0.0, 1.0])], unit="reward"))

    low, high = told["series"][0]["py"]  # type: ignore[index]
    assert high < low, "a picture counts downwards"
    assert told["px"] == sorted(told["px"])  # type: ignore[type-var]


def test_bars_are_means_of_neighbours_where_there_are_many_steps() -> None:
    steps = list(range(1, 121))

    told = _told(stacked_bars(steps, [Series("training", [float(step) for step in steps])], unit="s"))

    assert told["x"][:2] == ["1 to 2, mean", "3 to 4, mean"]
    assert told["series"][0]["text"][:2] == ["1.5", "3.5"]  # type: ignore[index]


def test_a_long_run_is_drawn_with_fewer_points_and_keeps_its_evaluations_scale() -> None:
    steps = list(range(1, 10_001))
    series = [Series("training", [1.0] * len(steps)), Series("held-out", [0.5] * len(steps), has_marks=True)]

    told = _told(line_chart(steps, series, unit="reward"))

    assert len(told["x"]) <= 1000
    assert (told["x"][0], told["x"][-1]) == ("1 to 10, mean", "9991 to 10000, mean")
    assert {len(one["text"]) for one in told["series"]} == {len(told["x"])}  # type: ignore[index, call-overload]


def test_of_a_long_run_no_evaluation_and_no_spike_is_passed_over() -> None:
    steps = list(range(1, 3001))
    rare = [float(step) if step % 100 == 0 else None for step in steps]
    spike = [301.0 if step == 1500 else 1.0 for step in steps]
    series = [Series("held-out", rare, has_marks=True), Series("norm", spike), Series("oldest", spike, False, True)]

    told = _told(line_chart(steps, series, unit=""))

    first, second, third = told["series"]
    assert sum(text is not None for text in first["text"]) == 30  # type: ignore[index]
    assert "101" in second["text"]  # type: ignore[index]
    assert "301" in third["text"]  # type: ignore[index]


def test_without_values_there_is_no_chart() -> None:
    for chart in (line_chart([1], [Series("x", [None])], unit=""), bars([], unit="", label="")):
        assert chart == '<p class="none">no values yet</p>'
    for chart in (line_chart([], [Series("x", [])], unit=""), stacked_bars([], [], unit="")):
        assert chart == '<p class="none">no steps yet</p>'


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (-0.45, 0.35, [-0.6, -0.4, -0.2, 0, 0.2, 0.4]), (0, 0, [0, 0.25, 0.5, 0.75, 1])],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high, 4) == pytest.approx(wanted)


def test_ticks_of_steps_are_whole() -> None:
    assert step_ticks(1, 60) == [20, 40, 60]
    assert step_ticks(1, 3) == [1, 2, 3]
    assert step_ticks(7, 7) == [7]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.12345, "0.123"), (1e-7, "1.0e-07"), (1234, "1,234"), (244_000, "244k"), (3_400_000, "3.4M"),
        (-0.5, "-0.5"), (5e12, "5.00e+12"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_tokens_are_counted_by_their_age_in_the_step_that_trained_them(tmp_path: Path) -> None:
    archive_step(tmp_path, 1)
    archive_step(tmp_path, 3)
    recorded = [one for path in sorted(tmp_path.glob("trajectories/*")) for one in read_recorded([path])]

    assert count_ages(recorded) == {0: 4 * 8 + 4 * 4, 1: 4 * 4}


def test_samples_are_the_lowest_the_middle_and_the_highest_each_of_another_group(tmp_path: Path) -> None:
    for step in range(1, 7):
        archive_step(tmp_path, step)
    recorded = [one for path in tmp_path.glob("trajectories/*") for one in read_recorded([path])]

    samples = choose_samples(recorded, IdDetokenizer())

    assert [one.what for one in samples] == ["lowest"] * 2 + ["median"] * 2 + ["highest"] * 2
    assert [one.entry.reward for one in samples] == [0, 0, 0, 0, 3, 3]
    assert len({one.entry.group for one in samples}) == 6


def test_the_verb_writes_a_runs_report_from_its_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = _run(tmp_path)
    archive_step(directory.path, 1)
    write_lines(directory.path, line(1, reward_mean=0.625, num_tokens=32, time_step_s=2.0))

    assert main(["status", "--run", str(directory.path), "--html", str(tmp_path / "out.html")]) == 0

    page = _Page((tmp_path / "out.html").read_text())
    assert "report of 1 steps written to" in capsys.readouterr().out
    assert "0.625mean reward, last 1 steps" in page.text
    assert "highest: reward 3" in page.text
    assert main(["status", "--run", str(directory.path), "--watch"]) == 2


def test_steps_that_the_run_went_back_behind_are_marked_and_their_evaluations_left_out(tmp_path: Path) -> None:
    directory = _run(tmp_path)
    write_lines(directory.path, line(1), line(2))
    abandoned = [{**line(step), "weights_version": f"1-{step}", "abandoned_by": 2} for step in (2, 3)]
    (directory.path / "metrics_abandoned.jsonl").write_text("".join(json.dumps(one) + "\n" for one in abandoned))
    evaluated = [{"eval_id": version, "step": 2, "accuracy": value} for version, value in (("1-2", 0.9), ("2-2", 0.1))]
    (directory.path / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluated))

    assert main(["status", "--run", str(directory.path), "--html", str(tmp_path / "out.html")]) == 0

    text = (tmp_path / "out.html").read_text()
    assert "lineage 2 went back behind steps 2 to 3" in _Page(text).text
    (chart,) = [told for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "given up" in str(told := _told(svg))]
    held_out = next(one for one in chart["series"] if one["name"] == "held-out")
    assert held_out["text"] == [None, "0.1", None]


def test_a_watched_report_of_a_run_that_is_over_leaves_its_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a broker is started again and again, and a run that is resumed at that moment is refused."""
    directory = _run(tmp_path)
    anyio.run(_declare, directory)
    monkeypatch.setattr("areal_async.monitor.report.write.ASK_EVERY_S", 0.0)
    monkeypatch.setattr("areal_async.monitor.trajectory_sources.ASK_S", 20.0)
    takings: list[int] = []

    def look(_: float) -> None:
        for thread in threading.enumerate():
            if thread.name == "untrained":
                thread.join()
        takings.append(directory.lock.stat().st_mtime_ns)
        if len(takings) == 3:
            held.enter_context(directory.locked("made"))
            (directory.path / "bus" / "url").unlink()  # it cannot be asked now, however long
            monkeypatch.setattr("areal_async.monitor.trajectory_sources.ASK_S", 0.2)
        if len(takings) == 6:
            held.close()
            monkeypatch.setattr("areal_async.monitor.trajectory_sources.ASK_S", 20.0)
            directory.write_bus_url("nats://127.0.0.1:1")
        if len(takings) == 10:
            raise KeyboardInterrupt

    with ExitStack() as held, pytest.raises(KeyboardInterrupt):
        write_report(directory, tmp_path / "out.html", is_watched=True, pause=look)

    stopped, live, ended = set(takings[:3]), set(takings[3:6]), set(takings[6:])
    assert [len(one) for one in (stopped, live, ended)] == [1, 1, 1]
    assert live != ended, "it is asked at its end"
    assert capsys.readouterr().err.count("only what was trained is listed") == 1


async def _declare(directory: RunDirectory) -> None:
    """Have the run's streams made, as its first start does."""
    directory.write_bus_url("nats://127.0.0.1:1")
    async with visit(directory) as (settings, bus):
        await declare(bus, settings)


def test_a_watched_report_is_written_again_after_a_step(tmp_path: Path) -> None:
    directory = _run(tmp_path)
    seen: list[str] = []

    def wait(seconds: float) -> None:
        assert seconds <= 0.5, "a step is to be seen within a second"
        seen.append(_Page((tmp_path / "out.html").read_text()).text)
        write_lines(directory.path, *(line(step) for step in range(1, len(seen) + 1)))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(directory, tmp_path / "out.html", is_watched=True, pause=wait)

    assert [f"step {step} of 200" in text for step, text in enumerate(seen)] == [True] * 3


def test_a_report_that_cannot_be_written_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = _run(tmp_path), tmp_path / "folder"
    folder.mkdir()

    for path, sentence in (
        (Path("/proc/no/y.html"), "--html: got /proc/no/y.html, need what can be written: No such file or directory; "),
        (folder, f"--html: got {folder}, a directory, need a file; name one in it"),
    ):
        assert main(["status", "--run", str(run.path), "--html", str(path)]) == 2
        assert sentence in capsys.readouterr().err

    assert {path.name for path in tmp_path.iterdir()} == {"made", "folder"}


def test_what_replaces_a_file_leaves_it_as_it_was_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")

    def write() -> None:
        with replacing("--html", path) as temporary:
            temporary.symlink_to("/dev/full")
            temporary.write_text("after")

    with pytest.raises(UserError, match="need what can be written: No space left on device; name another place"):
        write()

    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]
