"""Several workflows in one run: each has its share of the prompts, its own sizes, its own evaluation."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_async.types import GroupId
from tests.e2e.test_run import REPOSITORY, Run, assert_accounts

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


def examined(run: Run) -> dict[str, Any]:
    """Return what the doctor says of a run that has ended."""
    words = [sys.executable, "-m", "areal_async", "doctor", "--run", str(run.directory), "--json"]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    diagnosis: dict[str, Any] = json.loads(ended.stdout)
    return diagnosis


def is_mental(group_id: str) -> bool:
    """Its rows come after the calculator's."""
    return GroupId.parse(group_id).index >= 4096


def test_a_mix_keeps_its_ratio_and_evaluates_each_task(tmp_path: Path) -> None:
    run = Mixed(tmp_path, "mixed", run__steps=2)

    ended = run.finish("--tasks.1.eval.limit", "8")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    for line in run.lines:
        assert line["groups/calculator"] + line["groups/mental"] == line["num_groups"]
    assert sum(line["groups/mental"] for line in run.lines) > 0
    sizes = Counter(row["group_id"] for row in run.trained)
    assert {count for group_id, count in sizes.items() if is_mental(group_id)} <= {2, 3, 4}
    assert {count for group_id, count in sizes.items() if not is_mental(group_id)} <= {4, 5, 6, 7, 8}
    assert [(one["workflow"], one["step"], one["num_scored"] + one["num_failed"]) for one in run.evaluations] == [
        ("calculator", 0, 16), ("mental", 0, 8), ("calculator", 2, 16), ("mental", 2, 8),
    ]  # fmt: skip
    for one in run.evaluations:
        assert (one["oldest"], one["newest"]) == (f"1-{one['step']}",) * 2
    assert "greedy accuracy of mental" in ended.stdout
    (covered,) = [ruling for ruling in examined(run)["rulings"] if ruling["promise"] == "P7"]
    assert covered["verdict"] == "proved", covered
    many, few = [int(part.split(" prompts")[0].rpartition(" ")[2]) for part in covered["sentence"].split("; ")[:2]]
    assert abs(few - (many + few) / (RATIO + 1)) < 1
