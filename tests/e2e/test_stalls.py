"""A run that stands still says by id who holds it up, has everybody write where they stand, and ends if it is told to.

Every test starts `python -m areal_async run` as a user would.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0
HANGING = """
import itertools
from pathlib import Path

import anyio

calls = itertools.count()


async def hanging(prompt, policy):
    await policy.chat([{"role": "user", "content": prompt["question"]}])
    if next(calls) == 10:
        Path(__file__).with_name("hangs").write_text(f"{prompt.epoch}-{prompt.index}-0")
        await anyio.sleep_forever()
    return 1.0
"""

pytestmark = pytest.mark.timeout(240)


@contextmanager
def _running(tmp_path: Path, workflow: Path | str, **settings: Any) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable, "-m", "areal_async", "run", str(workflow), "--config", "configs/gsm8k_cpu.yaml",
        "--run.directory", str(tmp_path), "--run.name", "run", "--eval.limit", "2", "--eval.every_steps", "0",
        "--rollout.batch_groups", "2", "--rollout.group_size", "4", "--rollout.min_group_size", "2",
        "--rollout.sampling.max_new_tokens", "8", "--rollout.episode_deadline_s", "600",
    ]  # fmt: skip
    for key, value in settings.items():
        command += [f"--{key.replace('__', '.')}", str(value)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # everything it started ends with it


def _stalls(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "run" / "logs" / "controller.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == "run.stalled"]


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_at, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.1)


def _pid_of_server(launcher: "subprocess.Popen[str]") -> int | None:
    """Find the process of the inference server among the launcher's descendants."""
    descendants = [launcher.pid]
    for parent in descendants:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            descendants += map(int, children.read_text().split())
    for pid in descendants:
        if b"areal_async.inference.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def test_a_server_that_is_stopped_is_named_as_the_one_that_all_wait_for(tmp_path: Path) -> None:
    with _running(tmp_path, "workflows/gsm8k.py", run__watchdog_s=3) as process:
        _wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), "the first step")
        pid = _pid_of_server(process)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        _wait_until(lambda: any(one["culprit"] == "server 0-0" for one in _stalls(tmp_path)), "the server to be named")

    sentence = next(one["sentence"] for one in _stalls(tmp_path) if one["culprit"] == "server 0-0")
    assert sentence.startswith("trainer waits for ")
    assert ", where nothing has moved for " in sentence


def test_a_workflow_that_awaits_for_ever_is_named_by_its_slot_and_ends_a_run_that_is_told_to_end(
    tmp_path: Path,
) -> None:
    workflow = tmp_path / "hanging.py"
    workflow.write_text(HANGING)

    with _running(tmp_path, workflow, run__watchdog_s=10, run__on_stall="end") as process:
        output, _ = process.communicate(timeout=DEADLINE_S)

    stall = _stalls(tmp_path)[-1]
    group_id = (tmp_path / "hangs").read_text()
    assert stall["culprit"].startswith(f"slot {group_id}.")
    assert f"group {group_id}, which is leased by node 0 and waits for the workflow of slot" in stall["sentence"]
    assert "run.stalled for" in output
    assert process.returncode not in (0, 2)
    assert stall["sentence"] in output.splitlines()[-1]
    logs = tmp_path / "run" / "logs"
    assert f"{workflow}:14 hanging" in (logs / "stacks-node-0.txt").read_text()
    assert {path.name for path in logs.glob("stacks-*")} == {
        "stacks-controller.txt", "stacks-node-0.txt", "stacks-trainer-0.txt"
    }  # fmt: skip
