"""The first hour on GPUs ends on any machine: it says what it could not run, and stops where the ground is missing."""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_hour
from tools.gpu_hour import FAIL, NOT_RUN, PASS, STEPS, Result, Step, judge, main

GROUND = Step(name="ground", file="none_such.py", num_gpus=0, deadline_s=100.0, is_ground=True)
HOUSE = Step(name="house", file="none_such.py", num_gpus=0, deadline_s=100.0)


def test_without_a_gpu_it_runs_to_its_end_and_says_what_each_step_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    status = main(["--report", str(tmp_path / "report.md")])

    told, report = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert status == gpu_hour.NOTHING_RAN
    assert "this machine can run none of it" in told.splitlines()[-1]
    for step in STEPS:
        assert f"| {step.name} | not run | 0 |" in report
    for text in (told, report):
        assert text.count("not run: needs 1 GPU, got 0") + text.count("not run: needs 2 GPUs, got 0") == len(STEPS)


def test_of_mig_devices_a_step_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x,MIG-y")
    assert gpu_hour.num_usable_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x,GPU-y")
    assert gpu_hour.num_usable_gpus() == 2


def test_a_step_that_others_stand_on_ends_the_hour_when_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], steps=(GROUND, HOUSE)) == 1

    assert "not run: ground: failed, and this stands on it" in capsys.readouterr().out


def test_an_interrupt_ends_the_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a session of its own, and would go on with the GPUs."""
    started: list[subprocess.Popen[str]] = []

    popen = subprocess.Popen

    def endless(command: Sequence[str], **how: Any) -> "subprocess.Popen[str]":
        process = popen(["sleep", "infinity"], **how)
        monkeypatch.setattr(process, "wait", interrupted)
        started.append(process)
        return process

    def interrupted(*_: float) -> None:
        monkeypatch.setattr(started[0], "wait", partial(popen.wait, started[0]))
        raise KeyboardInterrupt

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_hour.subprocess, "Popen", endless)
    with pytest.raises(KeyboardInterrupt):
        main([], steps=(GROUND,))

    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_what_a_late_step_leaves_behind_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own processes in other sessions have its output open still."""
    left = tmp_path / "left"
    popen = subprocess.Popen
    script = f"setsid sleep 600 & echo $! > {left}; echo begun; sleep 600"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_hour.subprocess, "Popen", lambda command, **how: popen(["sh", "-c", script], **how))
    try:
        assert main([], steps=(dataclasses.replace(GROUND, deadline_s=3.0),)) == 1
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)

    assert "longer than 3 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "output", "word", "notes"),
    [
        (0, "figure: 1.5 tokens\n.\n2 passed in 3.0s", PASS, ("1.5 tokens",)),
        (0, "SKIPPED [1] a.py: not run: needs 4 GPUs, got 2\n1 passed, 1 skipped in 1s", PASS,
         ("not run: needs 4 GPUs, got 2",)),
        (0, "SKIPPED [1] a.py: not run: needs 4 GPUs, got 2\n1 skipped in 1s", NOT_RUN,
         ("not run: needs 4 GPUs, got 2",)),
        (0, "2 passed, 1 warning in 75.1s (0:01:15)\n[rank0]: what a process says as it ends", PASS, ()),
        (1, "figure: 0.3\nE assert\n1 failed in 1s", FAIL,
         ("0.3", "pytest ended with 1", "figure: 0.3", "E assert", "1 failed in 1s")),
        (None, "hanging", FAIL, ("longer than 100 s", "hanging")),
    ],
)  # fmt: skip
def test_what_pytest_wrote_is_judged(status: int | None, output: str, word: str, notes: tuple[str, ...]) -> None:
    assert judge(HOUSE, status, output, 1.0) == Result(HOUSE, word, 1.0, notes)


def test_each_step_is_a_file_and_each_file_a_step() -> None:
    files = {path.name for path in (gpu_hour.ROOT / "tests" / "gpu").glob("test_*.py")}

    assert {step.file for step in STEPS} == files
