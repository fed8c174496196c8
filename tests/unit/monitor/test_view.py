"""What is shown of a run is what its files and its roles say, through rewinds, torn lines and nonsense."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_async.config.settings import DatasetSettings, RolloutSettings, RunSettings, Settings, TaskSettings
from areal_async.monitor.display import LiveDisplay, PlainDisplay, render, sparkline
from areal_async.monitor.token_text import visible
from areal_async.monitor.view import KEPT_STEPS, MAX_REPORTS, RunView, event_text, notice_text
from areal_async.process.json_lines import JsonLines, read_json_lines

METRICS = "areal.g.metrics."
EVENTS = "areal.g.events.controller.0.run.ordered"
_CONTROLLER = b'{"state": "admitting", "waits_for": "credit", "in_flight": 10, "credits": 2}'


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    settings = Settings(
        run=RunSettings(name="g", steps=120, directory=tmp_path), rollout=RolloutSettings(batch_groups=4)
    )
    settings.run_directory.mkdir()
    return RunView(settings)


def _step(step: int, reward: float = 0.5) -> dict[str, Any]:
    return {
        "step": step, "reward_mean": reward, "staleness_mean": 0.8, "staleness_max": 2, "loss": 0.01234,
        "grad_norm": 0.5, "logprob_gap_mean": 0.002, "num_tokens": 5500, "time_step_s": 1.9,
        "time_wait_data_s": 0.2, "time_train_s": 1.1, "time_weights_s": 0.1,
    }  # fmt: skip


def _node_report(node_id: str, **more: object) -> bytes:
    report = {"node_id": node_id, "num_trajectories_running": 32, "num_groups_running": 4, "servers": {}}
    return json.dumps(report | more).encode()


def _append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_lines_are_read_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonLines(path)
    assert tail.read_new().lines == []

    path.write_text('{"step": 1}\n{"st')
    first = tail.read_new()
    with path.open("a") as file:
        file.write('ep": 2}\n')
    second = tail.read_new()

    assert (first.lines, second.lines) == ([{"step": 1}], [{"step": 2}])
    assert second.num_kept == 1


@pytest.mark.parametrize("num_surviving", [1, 5])
def test_of_a_replaced_file_only_what_it_has_otherwise_is_new(tmp_path: Path, num_surviving: int) -> None:
    path = tmp_path / "m.jsonl"
    _append(path, _step(1), _step(2), _step(3))
    tail = JsonLines(path)
    tail.read_new()

    surviving = [_step(1), *(_step(step, reward=0.1) for step in range(2, 2 + num_surviving))]
    _append(tmp_path / "new", *surviving)
    (tmp_path / "new").rename(path)
    news = tail.read_new()
    _append(path, _step(9))

    assert (news.lines, news.num_kept) == (surviving[1:], 1)
    assert tail.read_new() == ([_step(9)], len(surviving))


def test_line_cut_short_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew\n[3]\n{"step": 4}\n')

    assert [line["step"] for line in read_json_lines(path)] == [1, 4]


def test_rewound_run_shows_the_surviving_steps_and_tells_only_new_ones(view: RunView) -> None:
    path = view.settings.run_directory / "metrics.jsonl"
    _append(path, _step(1), _step(2), _step(3))
    view.read_files()

    path.unlink()
    _append(path, _step(1), _step(2, reward=0.9))
    news, _ = view.read_files()

    assert [line["step"] for line in view.steps] == [1, 2]
    assert news == [_step(2, reward=0.9)]


def test_a_long_run_is_shown_by_its_newest_steps_and_each_is_told_once(view: RunView) -> None:
    path = view.settings.run_directory / "metrics.jsonl"
    _append(path, *map(_step, range(1, 2 * KEPT_STEPS + 1)))
    told, _ = view.read_files()
    path.unlink()
    _append(path, *map(_step, range(1, 2 * KEPT_STEPS - 4)), _step(2 * KEPT_STEPS - 4, reward=0.9))
    news, _ = view.read_files()

    assert len(told) == 2 * KEPT_STEPS
    assert len(news) == 1
    assert [line["step"] for line in view.steps] == list(range(KEPT_STEPS + 1, 2 * KEPT_STEPS - 3))


def test_roles_say_what_they_do_and_for_whom_they_wait(view: RunView) -> None:
    view.on_metrics(METRICS + "trainer.0", b'{"state": "waiting", "waits_for": "group 0-7-0", "step": 3}')
    view.on_metrics(METRICS + "node.0", _node_report("a", tokens_per_s=1000))
    view.on_metrics(METRICS + "node.0", _node_report("b", tokens_per_s=200.5, num_groups_waiting_for_stream=2))
    view.on_metrics(METRICS + "controller.0", b'{"state": "admitting", "in_flight": 9}')

    assert view.roles == {
        "trainer": "waiting, waits for group 0-7-0",
        "node a": "32 trajectories of 4 groups running",
        "node b": "32 trajectories of 4 groups running, waits for room in the stream with 2 groups",
        "controller": "admitting",
    }
    assert view.sum_of_nodes("tokens_per_s") == 1200.5
    assert view.controller["in_flight"] == 9


def test_of_nodes_that_come_and_go_those_silent_for_longest_are_forgotten(view: RunView) -> None:
    view.on_metrics(METRICS + "controller.0", b'{"state": "admitting"}')
    view.on_metrics(METRICS + "node.stays", _node_report("stays"))

    for number in range(2 * MAX_REPORTS):
        view.on_metrics(METRICS + f"node.{number}", _node_report(f"{number}"))
        view.on_metrics(METRICS + "node.stays", _node_report("stays"))

    assert len(view.reports) == MAX_REPORTS
    assert {("controller", "0"), ("node", "stays"), ("node", f"{2 * MAX_REPORTS - 1}")} <= view.reports.keys()


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"7", b'{"state"'])
def test_messages_that_are_none_of_ours_are_ignored(view: RunView, data: bytes) -> None:
    view.on_metrics(METRICS + "node.a", data)

    assert view.roles == {}
    assert notice_text(EVENTS, data) is None


@pytest.mark.parametrize("count", ["NaN", "1e400", "Infinity", "1" + "0" * 400, '"many"', "[1]", "null"])
def test_numbers_that_are_none_leave_the_display_as_it_is(view: RunView, count: str) -> None:
    """The launcher draws it: what ends the display ends the run."""
    keys = ("num_groups_waiting_for_stream", "num_trajectories_running", "num_groups_running", "tokens_per_s")
    said = ", ".join(f'"{key}": {count}' for key in keys)

    view.on_metrics(METRICS + "node.a", f'{{{said}, "servers": {{"s": {{"num_requests": {count}}}}}}}'.encode())

    Console(file=io.StringIO()).print(render(view))
    assert view.sum_of_nodes("tokens_per_s") == 0.0


def test_a_node_does_not_speak_for_the_run() -> None:
    forged = b'{"event": "run.ordered", "order": "stop", "by": "ann"}'

    assert notice_text("areal.g.events.node.0.run.ordered", forged) is None
    assert notice_text("areal.g.events.node.0.server.fenced", forged) is None


def test_events_are_told_in_one_line() -> None:
    stalled = b'{"event": "run.stalled", "quiet_s": 120, "sentence": "trainer waits for cut 5", "chain": []}'

    assert notice_text(EVENTS, b'{"event": "run.ordered", "at": "2026", "order": "stop"}') == "run.ordered order=stop"
    assert notice_text(EVENTS, stalled) == "run.stalled for 120 s: trainer waits for cut 5"
    assert notice_text(EVENTS, b'{"event": "role.left", "crew": "node-0"}') is None, "status tells it, and the launcher"
    alarm = b'{"event": "alarm.raised", "name": "equal_rewards", "sentence": "all rewards are equal for 5 steps"}'
    assert notice_text(EVENTS, alarm) == "alarm.raised: all rewards are equal for 5 steps"
    evaluated = {"event": "evaluation.finished", "version": "1-4", "accuracy": -0.5}
    assert event_text(evaluated | {"is_graded": False}) == "evaluation.finished version=1-4 accuracy=-0.5"
    assert event_text(evaluated | {"is_graded": True}) == "evaluation.finished version=1-4 mean_reward=-0.5"
    lost = {"event": "role.lost", "at": "2026", "crew": "node-0", "reason": "node-0 ended by SIGKILL", "num_starts": 2}
    assert event_text(lost) == "role.lost node-0 (node-0 ended by SIGKILL)"


def test_what_an_operator_gave_as_name_and_reason_does_not_act_on_the_terminal(
    view: RunView, capsys: pytest.CaptureFixture[str]
) -> None:
    ordered = {"event": "run.ordered", "order": "stop", "by": "\x1b[2Jann", "reason": "late\nrun g finished"}
    told = "run.ordered order=stop by=␛[2Jann reason=late run g finished"
    terminal = io.StringIO()

    assert notice_text(EVENTS, json.dumps(ordered).encode()) == event_text(ordered) == told
    for display in (PlainDisplay(view), LiveDisplay(view, Console(file=terminal))):
        display.notify("still paused by \x1b[2Jann\n: nothing is admitted")
    assert capsys.readouterr().out == terminal.getvalue() == "still paused by ␛[2Jann : nothing is admitted\n"


def test_plain_display_writes_one_line_per_step_and_evaluation(
    view: RunView, capsys: pytest.CaptureFixture[str]
) -> None:
    display = PlainDisplay(view)
    view.on_metrics(METRICS + "node.0", _node_report("a", tokens_per_s=3200))
    _append(view.settings.run_directory / "metrics.jsonl", _step(12))
    _append(
        view.settings.run_directory / "eval.jsonl",
        {"eval_id": "1-12", "step": 12, "accuracy": 0.4375, "num_scored": 256, "num_failed": 1},
    )

    display.write_news()
    sampled = {"num_samples": 8, "pass_at": {"1": 0.5, "8": 0.875}}
    _append(
        view.settings.run_directory / "eval.jsonl",
        {"eval_id": "1-20", "accuracy": 0.5, "num_scored": 256},
        {"eval_id": "1-25", "accuracy": -0.5, "num_scored": 256, "is_graded": True},
        {"eval_id": "1-30", "accuracy": None, "num_scored": 0, "num_failed": 3, "reasons": {"late": 1, "no tool": 2}},
        {"eval_id": "1-40", "accuracy": 0.5, "num_scored": 2048} | sampled,
    )
    display.write_news()

    assert capsys.readouterr().out.splitlines() == [
        "step 12/120 reward 0.500 staleness 0.8/2 loss 0.0123 grad 0.500 gap 0.0020"
        " 1.9 s (wait 0.2 train 1.1 weights 0.1) gen 3200 tok/s train 5000 tok/s",
        "eval of version 1-12: accuracy 0.438 over 256 rows, 1 failed",
        "eval of version 1-20: accuracy 0.500 over 256 rows",
        "eval of version 1-25: mean reward -0.500 over 256 rows",
        "eval of version 1-30: accuracy none over 0 rows, 3 failed: no tool (2 times)",
        "eval of version 1-40: avg@8 0.500, pass@8 0.875 over 2048 answers",
    ]
    assert [line["eval_id"] for line in view.evaluations] == ["1-12", "1-20", "1-25", "1-30", "1-40"]


def test_each_of_several_tasks_is_shown_with_its_own_evaluations(
    view: RunView, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tuple(TaskSettings(workflow=f"{name}.py", dataset=DatasetSettings(path="x")) for name in ("a", "b"))
    view.settings = view.settings.model_copy(update={"tasks": tasks})
    lines = [
        {"eval_id": "1-0", "step": 0, "workflow": name, "accuracy": accuracy, "num_scored": 8}
        for name, accuracy in (("a", 0.25), ("b", 0.5))
    ]
    _append(view.settings.run_directory / "eval.jsonl", *lines)

    PlainDisplay(view).write_news()

    assert capsys.readouterr().out.splitlines() == [
        "eval of version 1-0, a: accuracy 0.250 over 8 rows",
        "eval of version 1-0, b: accuracy 0.500 over 8 rows",
    ]
    assert "eval a  0.250 @0" in _drawn(view)
    assert "eval b  0.500 @0" in _drawn(view)


def _drawn(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(view))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_panel_can_be_drawn_before_anything_is_known(view: RunView) -> None:
    text = _drawn(view)

    assert "run g" in text
    assert "0/120" in text
    assert "in flight 0" in text


def test_panel_shows_the_alarms_of_the_newest_step_alone(view: RunView) -> None:
    view.steps.append({"step": 1, "alarms": 2, "alarm_names": "equal_rewards logprob_gap"})
    assert "equal rewards, logprob gap" in _drawn(view)

    view.steps.append({"step": 2, "alarms": 0})
    assert "alarms" not in _drawn(view)


def test_panel_shows_the_alarm_of_a_run_without_a_step(view: RunView) -> None:
    view.on_metrics("areal.g.metrics.controller.0", b'{"state": "admitting", "alarm_names": "no_step"}')

    assert "no step" in _drawn(view)


def test_panel_shows_steps_servers_groups_and_who_waits(view: RunView) -> None:
    _append(view.settings.run_directory / "metrics.jsonl", _step(11, 0.25), _step(12, 0.75))
    _append(view.settings.run_directory / "eval.jsonl", {"step": 0, "accuracy": 0.31})
    view.read_files()
    view.on_metrics(METRICS + "controller.0", _CONTROLLER)
    servers = {"0-1": {"version": "1-11", "fence": "", "num_requests": 64}, "0-2": {"version": "", "fence": "dead"}}
    view.on_metrics(METRICS + "node.0", _node_report("0", servers=servers))

    text = _drawn(view)

    for part in (
        "12/120",
        "0.750, last 2: 0.500  ▁█",
        "mean 0.80, max 2 of 2",
        "in flight 10 (running 4, ready or training 6), credits 2",
        "version 1-11, 64 requests",
        "version none, 0 requests, fenced: dead",
        "0.310 @0",
        "admitting, waits for credit",
    ):
        assert part in text


@pytest.mark.parametrize("evil", ["\x1b]0;x\x07\x9b2J", "[/b][red]", "\u202e"])
def test_what_a_node_says_of_itself_neither_acts_on_the_terminal_nor_ends_the_panel(view: RunView, evil: str) -> None:
    """It is the launcher that draws it."""
    servers = {evil: {"version": evil, "fence": evil}}
    view.on_metrics(METRICS + "node.0", _node_report(evil, servers=servers))

    text = _drawn(view)

    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert f"server {visible(evil)}" in text
    assert f"node {visible(evil)}" in text


def test_panel_says_how_many_prompts_a_curriculum_has_passed_over(view: RunView) -> None:
    view.on_metrics(METRICS + "controller.0", b'{"state": "admitting", "in_flight": 10, "credits": 2, "skipped": 7}')

    assert "credits 2, passed over 7 prompts" in _drawn(view)


def test_sparkline_spans_from_least_to_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
