"""The workflows with a search and with Python run to their end on a CPU, with their own settings."""

from pathlib import Path

import pytest

from tests.e2e.test_run import Run, assert_ran_well

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


@pytest.mark.parametrize("name", ["search", "python_tool"])
def test_workflow_with_a_tool_runs_to_its_end(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, name, run__steps=2, eval__limit=8)

    ended = run.finish("--config", f"configs/{name}_cpu.yaml", workflow=f"workflows/{name}.py")

    assert ended.returncode == 0, ended.stdout
    assert [line["step"] for line in run.lines] == [1, 2]
    assert_ran_well(run)
    assert all(line["rollout/num_tool_calls"] > 0 for line in run.lines), run.lines
