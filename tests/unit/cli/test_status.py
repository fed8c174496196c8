"""The status of a run names who is missing and why, from what the services, the launcher and the servers say."""

import dataclasses
import io

import pytest
from rich.console import Console

from areal_async.cli.status import ENDED, MISSING, OK, Member, Status, members_of, render, state_of
from areal_async.run_state import Control, CrewState
from areal_async.settings import Settings, TrainerSettings
from areal_async.types import RunState

SETTINGS = Settings(trainer=TrainerSettings(num_ranks=2))
CREWS = {
    "crew.controller": CrewState(name="controller", state="running", num_starts=1),
    "crew.node-0": CrewState(name="node-0", state="died", reason="node-0 ended by SIGKILL", num_starts=2),
    "crew.trainer": CrewState(name="trainer", state="finished", num_starts=1),
}


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
    ("run_state", "control", "presence", "state"),
    [
        ("running", Control(), OK, "running"),
        ("running", Control(is_paused=True), OK, "paused"),
        ("running", Control(is_paused=True, is_stopping=True), OK, "stopping"),
        ("running", Control(is_paused=True), MISSING, "not running"),
        ("finished", Control(), MISSING, "finished"),
        ("failed", Control(is_stopping=True), OK, "failed"),
    ],
)
def test_the_state_is_one_word(run_state: str, control: Control, presence: str, state: str) -> None:
    members = [Member(role="node", instance="0", presence=presence)]

    assert state_of(RunState(state=run_state), control, members) == state


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
        admitted=64,
        settled=16,
        in_flight=48,
        credits=0,
        queue={"tickets": {"num_messages": 16, "num_bytes": 4000}},
        members=members_of(SETTINGS, {("controller", "0"): {"state": "paused"}}, CREWS),
        servers=[{"id": "0-0", "version": "1-12", "is_fenced": True, "reason": "starting", "num_requests": 7}],
        notes=["node 0 does not answer: node-0 ended by SIGKILL"],
    )
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)

    console.print(*render(status), sep="\n")

    text = console.export_text()
    for piece in ("run gsm8k: paused (by ann@host", "12/200, weights 1-12", "0.500, last evaluation 0.625",
                  "16 tickets", "48 in flight", "no answer", "starting", "node 0 does not answer"):  # fmt: skip
        assert piece in text, text
    assert max(map(len, text.splitlines())) <= width
    assert not status.is_healthy
    assert dataclasses.replace(status, notes=[]).is_healthy
