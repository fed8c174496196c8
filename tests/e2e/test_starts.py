"""One run through all its starts: in vain, killed, resumed by its name, finished, and going on from there.

It stays what it was started as: what the first start was given holds in every later one.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_async.launch.run_directory import RunDirectory
from areal_async.process.failpoints import FIRED, SPECIFICATION
from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, collect, events, said_by, wait_until

pytestmark = [pytest.mark.timeout(480), pytest.mark.whole_runs]

STEPS, MORE_STEPS = 6, 8
FLAGS = [
    "--run.steps", str(STEPS), "--trainer.lr", "1e-3", "--trainer.warmup_steps", "0", "--rollout.batch_groups", "2",
    "--rollout.max_staleness", "4", "--eval.limit", "8", "--eval.every_steps", "0", "--trainer.keep_checkpoints", "1",
    "--trainer.checkpoint_every_steps", "2",
]  # fmt: skip
"""Given once, at the first start."""


def _start(run: Run, *words: str, fault: str = "") -> "subprocess.Popen[str]":
    place = ["--run.directory", str(run.directory.parent), "--no-display"]
    return subprocess.Popen(
        [sys.executable, "-m", "areal_async", "run", *words, *place],
        cwd=REPOSITORY,
        env={**os.environ, SPECIFICATION: fault, FIRED: str(run.directory.with_name("fired"))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(run: Run, *words: str) -> str:
    with _start(run, *words) as process:
        ended = collect(process)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _kill_all(run: Run, launcher: "subprocess.Popen[str]") -> None:
    """Leave nobody the time to say a word; who starts others goes first."""
    launcher.kill()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if str(run.directory) in words:
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, UnicodeDecodeError):
            continue


def _recorded(run: Run) -> int:
    """Return the step of the newest checkpoint that the trainer has said to be recorded; 0 for none."""
    return max((one["step"] for one in events(run, "trainer-0", "checkpoint.written")), default=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("starts"), "story")


def test_a_start_with_a_wrong_model_leaves_the_name_free(run: Run) -> None:
    with _start(run, "workflows/gsm8k.py", "--run.name", "story", *FLAGS, "--model.path", "nobody/none") as process:
        ended = collect(process)

    assert ended.returncode == 2, ended.stdout
    assert "model.path: nobody/none is neither on this disk nor to be had" in ended.stdout
    assert not run.directory.exists()


def test_a_run_that_was_killed_goes_on_by_its_name_as_it_was_begun(run: Run) -> None:
    # A trainer that stands still at its second checkpoint is in the middle of the run, however slow who kills it is.
    fault = "trainer.before_checkpoint:2:stop"
    with _start(run, "workflows/gsm8k.py", "--run.name", "story", *FLAGS, fault=fault) as process:
        run.wait_for_step(3, process)
        wait_until(lambda: _recorded(run) > 0, "a checkpoint")  # written beside the steps: a slow disk's comes later
        begun = (run.directory / "config.yaml").read_text()
        _kill_all(run, process)
        process.communicate()
    recorded, on_disk = _recorded(run), RunDirectory(run.directory).checkpointed_step
    assert on_disk < STEPS, "it was to be killed in the middle"

    with _start(run, "story") as process:
        run.wait_for_step(recorded + 1, process)
        exported = said_by("export", run.directory, "--output", str(run.directory.parent / "exported"))
        resumed = collect(process)

    assert resumed.returncode == 0, resumed.stdout
    told = re.search(r"run story goes on from step (\d+), its newest checkpoint", resumed.stdout)
    assert told is not None, resumed.stdout
    assert recorded <= int(told[1]) <= on_disk, "the trainer may have been killed before it could say so"
    assert (run.directory / "config.yaml").read_text() == begun
    assert not (run.directory / "changes.jsonl").exists()
    assert_accounts(run, num_steps=STEPS, max_staleness=4)
    assert {line["lr"] for line in run.lines} == {1e-3}
    # A step takes every group that is due, so it may have more; with another setting none would have so few.
    assert min(line["num_groups"] for line in run.lines) == 2
    assert exported.returncode == 0, exported.stderr
    assert "the model of checkpoint " in exported.stdout


def test_a_finished_run_says_so_and_goes_on_with_more_steps_and_another_rate(run: Run) -> None:
    again = _run(run, "workflows/gsm8k.py", "--run.name", "story", "--trainer.lr", "5e-4")
    assert f"run story is finished already, after step {STEPS}; more --run.steps go on from there" in again
    model = (run.directory / "model" / "model.safetensors").read_bytes()
    before = run.lines

    more = _run(run, "workflows/gsm8k.py", "--run.name=story", f"--run.steps={MORE_STEPS}", "--trainer.lr", "5e-4")

    version = before[-1]["weights_version"]
    assert (
        f"run story had finished, and goes on from step {STEPS}; the model of that step is kept as model_{version}"
        in (more)
    )
    for sentence in (f"run.steps was {STEPS}, is {MORE_STEPS}", "trainer.lr was 0.001, is 0.0005"):
        assert sentence in more.splitlines()
    assert_accounts(run, num_steps=MORE_STEPS, max_staleness=4)
    assert run.lines[:STEPS] == before
    assert [line["lr"] for line in run.lines[STEPS:]] == [5e-4] * (MORE_STEPS - STEPS)
    assert (run.directory / f"model_{version}" / "model.safetensors").read_bytes() == model
    assert (run.directory / "model" / "model.safetensors").read_bytes() != model
    changes = [json.loads(line) for line in (run.directory / "changes.jsonl").read_text().splitlines()]
    assert [(one["setting"], one["before"], one["after"]) for one in changes] == [
        ("run.steps", STEPS, MORE_STEPS),
        ("trainer.lr", 1e-3, 5e-4),
    ]


def test_every_promise_is_proved_of_a_run_that_went_on_from_its_end(run: Run) -> None:
    examined = said_by("doctor", run.directory, "--json")

    assert examined.returncode == 0, examined.stdout
    diagnosis: dict[str, Any] = json.loads(examined.stdout)
    assert {one["verdict"] for one in diagnosis["rulings"]} == {"proved"}, diagnosis
    assert diagnosis["is_finished"]
    covered = next(one for one in diagnosis["rulings"] if one["promise"] == "P7")
    assert not covered["sentence"].endswith(" 0 re-admissions"), "what its first end had left over was tried again"


def test_a_run_that_goes_on_is_no_other_run(run: Run) -> None:
    config = (run.directory / "config.yaml").read_text()

    with _start(run, "story", "--run.steps", "9", "--rollout.group_size", "4") as process:
        refused = collect(process)

    assert refused.returncode == 2
    assert (
        "run story: rollout.group_size was 8, is 4; a run that goes on keeps that: it says which data" in refused.stdout
    )
    assert (run.directory / "config.yaml").read_text() == config


def test_a_run_whose_store_has_lost_something_begins_nothing_anew(run: Run) -> None:
    (keys,) = (run.directory / "bus" / "jetstream").rglob("streams/KV_AREAL_story")
    metrics, aside = (run.directory / "metrics.jsonl").read_bytes(), run.directory / "keys"
    keys.rename(aside)

    with _start(run, "story", "--run.steps", str(MORE_STEPS + 1)) as process:
        refused = collect(process)

    assert refused.returncode == 2
    assert f"run story: its store in {run.directory / 'bus'} has lost KV_AREAL_story (how far the" in refused.stdout
    assert (run.directory / "metrics.jsonl").read_bytes() == metrics
    assert (run.directory / "model").is_dir(), "nothing was set aside"
    aside.rename(keys)
    assert f"run story is finished already, after step {MORE_STEPS}" in _run(run, "story")
