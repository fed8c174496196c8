"""The status of a run names who is missing and why, from what the services, the launcher and the servers say."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_async.cli.main import main
from areal_async.config.settings import RunSettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.monitor.snapshot import (
    ENDED,
    MISSING,
    OK,
    UNKNOWN,
    Member,
    Status,
    alarm_notes,
    broker_of,
    members_of,
    notes_of,
    reason_of,
    record_at,
    server_of,
    state_of,
    without_broker,
)
from areal_async.monitor.status_screen import render
from areal_async.protocol.run_state import Control, CrewState, RunState, ServerState
from areal_async.protocol.types import WeightsVersion
from areal_async.versions import tags
from areal_async.versions.tags import Tag

SETTINGS = Settings(trainer=TrainerSettings(num_ranks=2))
CREWS = {
    "crew.controller": CrewState(name="controller", state="running", num_starts=1),
    "crew.node-0": CrewState(name="node-0", state="died", reason="node-0 ended by SIGKILL", num_starts=2),
    "crew.trainer": CrewState(name="trainer", state="finished", num_starts=1),
}


def test_a_record_is_that_of_its_key_however_many_there_are_of_its_kind() -> None:
    critic, policy = (WeightsVersion(version=version, path="x") for version in ("1-3", "1-4"))
    records = {"weights.critic": critic, "weights.policy": policy, "control": Control()}

    assert record_at(records, "weights.policy", WeightsVersion) is policy
    assert record_at(records, "weights.judge", WeightsVersion) is None
    assert record_at(records, "control", WeightsVersion) is None


def test_every_process_that_is_to_be_there_is_listed_and_the_missing_one_with_its_cause() -> None:
    reports = {
        ("controller", "0"): {"state": "admitting", "waits_for": "a credit"},
        ("trainer", "0"): {"state": "training step 3"},
        ("node", "joined"): {"state": "runs 3 groups"},
    }

    members = {(one.role, one.instance): one for one in members_of(SETTINGS, reports, CREWS)}

    assert {name: one.presence for name, one in members.items()} == {
        ("controller", "0"): OK,
        ("node", "0"): MISSING,
        ("node", "joined"): OK,
        ("trainer", "0"): OK,
        ("trainer", "1"): ENDED,
    }
    missing = members["node", "0"]
    assert (missing.state, missing.num_starts, missing.why) == ("died", 2, "node-0 ended by SIGKILL")
    assert members["controller", "0"].waits_for == "a credit"


@pytest.mark.parametrize(
    ("run_state", "control", "presence", "is_live", "state"),
    [
        ("running", Control(), OK, True, "running"),
        ("running", Control(is_paused=True), OK, True, "paused"),
        ("running", Control(is_paused=True, is_stopping=True), OK, True, "stopping"),
        ("running", Control(is_paused=True), MISSING, False, "not running"),
        ("running", Control(is_paused=True), MISSING, True, "paused"),
        ("running", Control(), MISSING, True, "starting"),
        ("stopped", Control(), MISSING, True, "not running"),
        ("finished", Control(), MISSING, False, "finished"),
        ("failed", Control(is_stopping=True), OK, True, "failed"),
    ],
)
def test_the_state_is_one_word(run_state: str, control: Control, presence: str, *, is_live: bool, state: str) -> None:
    members = [Member(role="node", instance="0", presence=presence)]

    assert state_of(RunState(state=run_state), control, members, is_live=is_live) == state


def test_a_live_run_whose_processes_have_died_runs() -> None:
    dead = [Member(role="node", instance="0", presence=MISSING, why="node-0 ended by SIGKILL")]

    assert state_of(RunState(), Control(), dead, is_live=True) == "running"


def test_what_an_operator_gave_as_name_and_reason_does_not_act_on_the_terminal() -> None:
    control = Control(is_paused=True, by="\x1b[2Jann", reason="lunch\nrun m: finished")

    assert reason_of("paused", RunState(), control) == "by ␛[2Jann: lunch run m: finished"
    assert reason_of("failed", RunState(reason="\x1b]0;x\x07"), control) == "␛]0;x␇"


@pytest.mark.parametrize("width", [80, 120])
def test_one_screen_tells_the_step_the_queue_and_who_is_missing(width: int) -> None:
    status = Status(
        run="gsm8k",
        state="paused",
        reason="by ann@host, 5 s ago: lunch",
        step=12,
        steps=200,
        weights_version="1-12",
        reward_mean=0.5,
        accuracy=0.625,
        evaluation={"accuracy": 0.625},
        tags={"candidate": "1-12", "champion": "1-10"},
        admitted=64,
        settled=16,
        in_flight=48,
        credits=0,
        queue={"tickets": {"num_messages": 16, "num_bytes": 4000}},
        members=list(members_of(SETTINGS, {("controller", "0"): {"state": "paused"}}, CREWS)),
        servers=[
            {
                "id": "0-0",
                "version": "1-12",
                "is_fenced": True,
                "reason": "starting",
                "num_requests": 7,
                "tokens_per_s": 1234.5,
            }
        ],  # fmt: skip
        notes=["node 0 does not answer: node-0 ended by SIGKILL"],
    )
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)

    console.print(*render(status), sep="\n")

    text = console.export_text()
    for piece in ("run gsm8k: paused (by ann@host", "12/200, weights 1-12", "0.500, last evaluation 0.625",
                  "candidate 1-12, champion 1-10",
                  "16 tickets", "48 in flight", "no answer", "starting", " 1234 ",
                  "node 0 does not answer"):  # fmt: skip
        assert piece in text, text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("evil", ["\x1b]0;x\x07\x9b2J", "[/b][red]", "\ud800\u202e", "9" * 5000])
@pytest.mark.parametrize("number", ["many", None, {}, 10**400])
def test_what_a_node_says_of_itself_does_not_act_on_the_terminal(evil: str, number: object) -> None:
    """Anybody who has a node's key may say it."""
    server = ServerState(server_id="0-0", node_id=evil, url="", version=evil, failure=evil)
    report = {"state": evil, "waits_for": evil, "up_s": number, "pid": number}
    reports = {("node", evil): {**report, "servers": {"0-0": {"num_requests": number, "tokens_per_s": number}}}}
    members, servers = list(members_of(SETTINGS, reports, {})), [server_of(server, reports)]
    status = Status(
        run="g", state="running", reason="", step=1, steps=2, weights_version=evil, reward_mean=0.5, accuracy=None,
        members=members, servers=servers, notes=[f"server 0-0 waits for {evil}"],
    )  # fmt: skip
    file = io.StringIO()
    console = Console(width=120, file=file, highlight=False)

    console.print(*render(status), sep="\n")

    told = file.getvalue()
    assert not set(told) & set("\x1b\x07\x9b\ud800\u202e")
    assert len(told) < 50 * 1000
    if evil.startswith("["):
        assert f"node {evil}" in told


def test_a_server_goes_with_its_node_whatever_was_said_of_it_last() -> None:
    server = ServerState(server_id="0-0", node_id="0", url="", version="1-3")

    there = server_of(server, {("node", "0"): {"servers": {"0-0": {"num_requests": 7, "tokens_per_s": 3.5}}}})
    gone = server_of(server, {})

    assert (there["is_fenced"], there["version"], there["num_requests"]) == (False, "1-3", 7)
    assert there["tokens_per_s"] == 3.5
    assert (gone["is_fenced"], gone["version"], gone["reason"]) == (True, "", "node 0 does not answer")


@pytest.mark.parametrize(
    ("said", "waits_for"),
    [
        ({"version": "1-3"}, ""),
        ({"version": "1-3", "missed": "g1: nobody at h:7"}, "weights (missed broadcast g1: nobody at h:7)"),
        ({"fenced": True, "reason": "starting"}, ""),
        (
            {"fenced": True, "reason": "starting", "wants_weights": True},
            "weights (the next broadcast, or a copy on disk)",
        ),
        (
            {"fenced": True, "reason": "starting", "wants_weights": True, "unreadable": "no /w", "missed": "g1: late"},
            "weights (no /w; missed broadcast g1: late)",
        ),
    ],
)
def test_a_server_that_waits_for_weights_is_told_from_one_that_starts(said: dict[str, Any], waits_for: str) -> None:
    server = ServerState(**{"server_id": "0-0", "node_id": "0", "url": "", "version": "", **said})

    shown = server_of(server, {("node", "0"): {}})

    assert shown["waits_for"] == waits_for
    note = f"server 0-0 waits for {waits_for}"
    assert (note in notes_of("running", [], [shown])) == bool(waits_for)
    assert server_of(server, {})["waits_for"] == "", "its node does not answer"


def test_without_its_broker_a_run_is_shown_from_its_files_and_nobody_is_accused(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(name="alone", directory=tmp_path))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "metrics.jsonl").write_text('{"step": 4, "weights_version": "1-4", "reward_mean": 0.5}\n')

    tags.write(settings.run_directory, Tag(tag="champion", version="1-2"))

    status = without_broker(settings, "broker nats://127.0.0.1:1: not reachable within 2 s")

    assert (status.state, status.step, status.weights_version) == ("no broker", 4, "1-4")
    assert status.tags == {"champion": "1-2"}
    assert [(one.role, one.presence) for one in status.members] == [
        ("broker", MISSING), ("controller", UNKNOWN), ("trainer", UNKNOWN),
    ]  # fmt: skip
    assert status.notes == ["the broker does not answer: broker nats://127.0.0.1:1: not reachable within 2 s"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*render(status), sep="\n")
    assert "groups  unknown: the controller keeps the books, and does not answer" in console.export_text()


def test_a_broker_that_was_started_again_tells_why() -> None:
    crew = CrewState(
        name="broker", state="running", num_starts=2, reason="broker ended by SIGKILL", at="2026-01-01T00:00Z"
    )

    broker = broker_of(crew, is_live=True)

    assert (broker.presence, broker.num_starts, broker.why) == (OK, 2, "broker ended by SIGKILL")
    assert broker.up_s > 0
    assert broker_of(crew, is_live=False).presence == ENDED


def test_alarms_of_trainer_and_controller_are_notes() -> None:
    equal, dry = "all rewards are equal for 5 steps", "20 groups in a row ended untrained"

    assert alarm_notes({("controller", "0"): {"alarms": [dry]}, ("trainer", "0"): {"alarms": [equal]}}) == [
        f"alarm: {equal}",
        f"alarm: {dry}",
    ]
    for none in ({"alarms": []}, {}, {"alarms": "no list"}):
        assert alarm_notes({("trainer", "0"): none}) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--html", "x.html", "--bus.url", "nats://h:1"], "--html: got --bus.url, need a run whose files are here"),
        (["--bus.credentials", "x.nk"], "--bus.credentials: got no --bus.url, need the broker that it is for"),
        (["--bus.ca", "x.pem"], "--bus.ca: got no --bus.url, need the broker that it is for"),
    ],
)
def test_what_would_be_ignored_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run", "r", *words]) == UserError.exit_code
    assert capsys.readouterr().err.startswith(sentence)
