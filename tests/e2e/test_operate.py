"""A live run is watched and steered: by the verbs, and by a NATS client that knows the subjects alone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, collect, role_processes, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


def _verb(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "areal_async", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    run = Run(tmp_path, "operated", run__steps=500)
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
    wait_until(lambda: "node-0 ended by SIGKILL" in str(_status(run)["notes"]), "the missing node to be told")
    wait_until(lambda: all(one["presence"] == "ok" for one in _status(run)["members"]), "the node to be back")

    step = run.lines[-1]["step"]
    assert step == while_paused["step"]
    _verb("resume", "--run", str(run.directory), "--by", "ann")
    run.wait_for_step(step + 1, process)

    _verb("stop", "--run", str(run.directory), "--reason", "enough")
    stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert "run.ordered order=stop by=" in stopped.stdout
    last = run.lines[-1]["step"]
    assert _status(run)["state"] == "not running"

    resumed = run.finish("--run.steps", str(last + 2))
    assert resumed.returncode == 0, resumed.stdout
    assert_accounts(run, num_steps=last + 2, max_staleness=2)
    assert _status(run)["state"] == "finished"


def test_an_order_to_a_run_that_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    run = Run(tmp_path, "asleep", run__steps=1)
    assert run.finish().returncode == 0

    done = subprocess.run(
        [sys.executable, "-m", "areal_async", "pause", "--run", str(run.directory)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (2, "run asleep: it does not run now; start it first\n")
