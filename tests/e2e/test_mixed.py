"""Several workflows in one run: each has its share of the prompts, its own sizes, its own evaluation."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_async.process.atomic_folders import versions_in
from areal_async.protocol.types import GroupId, Version
from tests.e2e.test_doctor import diagnose
from tests.e2e.test_run import Run, assert_accounts, collect, role_processes, said_by, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

RATIO = 3


class Mixed(Run):
    """The run of ``configs/mixed_cpu.yaml``, which names its workflows itself."""

    def command(self, *arguments: str, workflow: str = "") -> list[str]:
        words = super().command("--config", "configs/mixed_cpu.yaml", *arguments, workflow="")
        return [word for word in words if word]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "eval.jsonl").read_text().splitlines()]


def is_mental(group_id: str) -> bool:
    """Its rows come after the calculator's."""
    return GroupId.parse(group_id).index >= 4096


def test_a_mix_keeps_its_ratio_and_evaluates_each_task(tmp_path: Path) -> None:
    """Its larger task is the workflow ``calculator`` with that one's own settings."""
    run = Mixed(tmp_path, "mixed", run__steps=2)

    ended = run.finish("--tasks.1.eval.limit", "8")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    for line in run.lines:
        assert line["groups/calculator"] + line["groups/mental"] == line["num_groups"]
    assert sum(line["groups/mental"] for line in run.lines) > 0
    assert all(line["failed"] == 0 and line["rollout/num_tool_calls"] > 0 for line in run.lines), run.lines
    assert 0 < sum(line["reward/calculator"] for line in run.lines) < 2, "the warm start can do it, and not well"
    sizes = Counter(row["group_id"] for row in run.trained)
    assert {count for group_id, count in sizes.items() if is_mental(group_id)} <= {2, 3, 4}
    assert {count for group_id, count in sizes.items() if not is_mental(group_id)} <= {4, 5, 6, 7, 8}
    assert [(one["workflow"], one["step"], one["num_scored"] + one["num_failed"]) for one in run.evaluations] == [
        ("calculator", 0, 16), ("mental", 0, 8), ("calculator", 2, 16), ("mental", 2, 8),
    ]  # fmt: skip
    for one in run.evaluations:
        assert (one["oldest"], one["newest"]) == (f"1-{one['step']}",) * 2
    assert "greedy accuracy of mental" in ended.stdout
    (covered,) = [ruling for ruling in diagnose(run.directory, status=0)["rulings"] if ruling["promise"] == "P7"]
    assert covered["verdict"] == "proved", covered
    many, few = [int(part.split(" prompts")[0].rpartition(" ")[2]) for part in covered["sentence"].split("; ")[:2]]
    assert abs(few - (many + few) / (RATIO + 1)) < 1


@pytest.mark.timeout(600)
def test_the_mix_of_a_live_run_changes_and_outlives_its_controller(tmp_path: Path) -> None:
    """One task is switched off, the controller killed, and the run resumed with another mix: each has one turn.

    It goes back, too, to an earlier checkpoint: while it lives, and when it is stopped.
    """
    run = Mixed(tmp_path, "remixed", run__steps=500, trainer__checkpoint_every_steps=50, trainer__keep_checkpoints=100)
    process = run.start()
    run.wait_for_step(2, process)

    told = _verb(run, "resume", "--set", "tasks.calculator.ratio=0", "--set", "trainer.checkpoint_every_steps=1")
    assert "tasks.calculator.ratio is 0 now" in told
    wait_until(lambda: [line["groups/calculator"] for line in run.lines[-2:]] == [0, 0], "one task alone")
    status = _verb(run, "status")
    assert "mix calculator 0.0%, mental 100.0%" in " ".join(status.split())
    assert "tasks.0.ratio = 0, trainer.checkpoint_every_steps = 1" in " ".join(status.split())
    newest = int(run.lines[-1]["step"])
    wait_until(lambda: _newest_checkpoint(run) >= newest - 1, "a checkpoint of nearly each step")
    assert [run.lines[at]["checkpoint_every_steps"] for at in (0, -1)] == [50, 1], "what each step was cut with"

    (controller,) = role_processes(run, "controller")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: role_processes(run, "controller") not in ([], [controller]), "another controller")
    off_at = len(run.lines)
    wait_until(lambda: len(run.lines) > off_at + 3, "a few steps more")
    assert {line["groups/calculator"] for line in run.lines[off_at:]} == {0}, "a change outlives a controller"
    _go_back(run, "the trainer is started anew")
    # Each step has its checkpoint: of three the last but two is this lineage's, and not one that was given up.
    wait_until(lambda: _lineage(run, at=-3) == 2, "three steps of the lineage that went back")
    _verb(run, "stop", "--reason", "enough")
    stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert "run.ordered order=stop by=" in stopped.stdout

    went_back = _go_back(run, "its next start, run remixed, goes on from")
    resumed = run.start("--tasks.0.ratio=6", "--rollout.batch_groups=16", "--trainer.checkpoint_every_steps=100")
    wait_until(lambda: run.lines[-1]["groups/calculator"] > 0, "the mix of the command line")
    _verb(run, "stop")
    ended = collect(resumed)
    assert ended.returncode == 0, ended.stdout
    assert "tasks.0.ratio was 0.0, is 6.0: for the prompts that are admitted from now on" in ended.stdout
    assert f"run remixed goes back to {went_back}, as" in ended.stdout
    assert _lineage(run) == 3
    (covered,) = [ruling for ruling in diagnose(run.directory, status=0)["rulings"] if ruling["promise"] == "P7"]
    assert covered["verdict"] == "proved", covered


def _verb(run: Run, verb: str, *words: str) -> str:
    ended = said_by(verb, run.directory, *words)
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout)


def _go_back(run: Run, told: str) -> str:
    """Have a run go back behind its last two checkpoints; return to which."""
    version = str(versions_in(run.directory / "checkpoints")[-3])
    assert told in _verb(run, "rollback", "--to", version, "--why", "to try it")
    return version


def _lineage(run: Run, *, at: int = -1) -> int:
    return Version.parse(run.lines[at]["weights_version"]).lineage


def _newest_checkpoint(run: Run) -> int:
    return max((version.step for version in versions_in(run.directory / "checkpoints")), default=0)
