"""A live run is watched and steered: by the verbs, and by a NATS client that knows the subjects alone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from areal_async.cli.status import OK, Status, ask_status
from areal_async.launch.run_directory import RunDirectory
from tests.e2e.test_run import DEADLINE_S, REPOSITORY, Run, assert_accounts, collect, role_processes, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_runs]


def _verb(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "areal_async", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _look(run: Run) -> Status:
    """What ``status`` would say, without the seconds of a processor that a new interpreter takes."""
    return anyio.run(ask_status, RunDirectory(run.directory.absolute()))


def _status(run: Run) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(_verb("status", "--run", str(run.directory), "--json"))
    return status


async def _ask(run: Run, subject: str) -> dict[str, Any]:
    client = await nats.connect(
        (run.directory / "bus" / "url").read_text().strip(),
        nkeys_seed=str(run.directory / "credentials" / "operator.nk"),
        inbox_prefix="_INBOX_services",
    )
    try:
        answer: dict[str, Any] = json.loads((await client.request(subject, b"", timeout=20)).data)
        return answer
    finally:
        await client.close()


def test_a_live_run_is_paused_resumed_watched_and_stopped_and_goes_on_from_there(tmp_path: Path) -> None:
    run = Run(tmp_path, "operated", run__steps=500, trainer__checkpoint_every_steps=50)
    process = run.start()
    run.wait_for_step(2, process)

    paused = asyncio.run(_ask(run, "areal.operated.control.pause"))
    wait_until(lambda: asyncio.run(_ask(run, "areal.operated.status.trainer.0"))["state"] == "waiting", "the pause")
    while_paused = _status(run)
    assert paused["is_paused"] is True
    assert while_paused["state"] == "paused"
    assert while_paused["notes"] == []

    (node,) = role_processes(run, "node")
    os.kill(node, signal.SIGKILL)
    wait_until(lambda: "node-0 ended by SIGKILL" in str(_look(run).notes), "the missing node to be told")
    wait_until(lambda: all(one.presence == OK for one in _look(run).members), "the node to be back")

    step = run.lines[-1]["step"]
    assert step == while_paused["step"]
    _verb(
        "resume",
        "--run",
        str(run.directory),
        "--by",
        "ann",
        "--set",
        "trainer.lr=1e-5",
        "--set",
        "rollout.max_staleness=1",
        "--set",
        "rollout.sampling.temperature=0.8",
    )
    wait_until(lambda: [line["lr"] for line in run.lines[-2:]] == [1e-5] * 2, "two steps at the new rate")
    wait_until(lambda: run.lines[-1]["temperature_mean"] == 0.8, "a step whose tokens were all sampled at 0.8")
    _kill_trainer_and_compare(run)

    _verb("stop", "--run", str(run.directory), "--reason", "enough")
    stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert "run.ordered order=stop by=" in stopped.stdout
    last = run.lines[-1]["step"]
    assert _status(run)["state"] == "not running"

    resumed = run.finish("--run.steps", str(last + 2))
    assert resumed.returncode == 0, resumed.stdout
    assert_accounts(run, num_steps=last + 2, max_staleness=2)
    finished = _status(run)
    assert finished["state"] == "finished"
    assert finished["changes"] == {
        "trainer.lr": 1e-5, "rollout.max_staleness": 1, "rollout.sampling.temperature": 0.8,
    }  # fmt: skip
    temperatures = [line["temperature_mean"] for line in run.lines]
    assert (temperatures[0], temperatures[-1]) == (1.0, 0.8)
    assert all(line["logprob_gap_mean"] < 0.02 for line in run.lines)
    rates = [line["lr"] for line in run.lines]
    since = rates.index(1e-5)
    assert set(rates[since:]) == {1e-5}, "a change outlives a crash and the run's end"
    changed = [json.loads(line) for line in (run.directory / "changes.jsonl").read_text().splitlines()]
    assert [(one["setting"], one["after"], one["by"]) for one in changed] == [
        ("trainer.lr", 1e-5, "ann"), ("rollout.max_staleness", 1, "ann"),
        ("rollout.sampling.temperature", 0.8, "ann"),
    ]  # fmt: skip
    _check_order_to_a_run_that_does_not_run(run)


def _check_order_to_a_run_that_does_not_run(run: Run) -> None:
    """It is one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "areal_async", "pause", "--run", str(run.directory)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (2, "run operated: it does not run now; start it first\n")


def _kill_trainer_and_compare(run: Run) -> None:
    """A step that is trained again after a crash is trained at the rate, and within the bound, that it was cut with."""
    before = {line["step"]: (line["lr"], line["staleness_max"]) for line in run.lines}
    for pid in role_processes(run, "trainer"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(run.lines) and run.lines[-1]["weights_version"].startswith("2-"), "the second trainer")
    wait_until(lambda: run.lines[-1]["step"] > max(before) + 1, "steps that were not trained before")
    after = {line["step"]: (line["lr"], line["staleness_max"]) for line in run.lines}
    assert {step: after[step] for step in before} == before
    assert max(after[step][1] for step in after if step > max(before) + 1) <= 1
