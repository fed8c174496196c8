"""The workflows with a search and with Python run to their end on a CPU, with their own settings."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_run import Run

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


@pytest.mark.parametrize("name", ["search", "python_tool"])
def test_workflow_with_a_tool_runs_to_its_end(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, name, run__steps=2, eval__limit=8)

    ended = run.finish("--config", f"configs/{name}_cpu.yaml", workflow=f"workflows/{name}.py")

    assert ended.returncode == 0, ended.stdout
    assert [line["step"] for line in run.lines] == [1, 2]
    assert all(line["failed"] == 0 and 0.0 <= line["reward_mean"] <= 1.0 for line in run.lines), run.lines
    assert all(line["info/num_tool_calls"] > 0 for line in run.lines), run.lines
    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluated] == [0, 2]
