"""An unmodified program that speaks OpenAI's API is trained by a whole run, as it is."""

from pathlib import Path

import pytest

from tests.e2e.test_run import Run

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_runs]


def test_program_of_its_own_is_trained(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        "agent",
        config="configs/openai_agent_cpu.yaml",
        run__steps=1,
        eval__limit=1,
        rollout__batch_groups=1,
        rollout__group_size=2,
        rollout__max_staleness=0,
    )

    done = run.finish(workflow="workflows/openai_agent.py")

    assert done.returncode == 0, done.stdout
    (line,) = run.lines
    assert line["failed"] == 0
    assert line["num_trajectories"] == 2
    assert all(row["num_tokens"] > 0 for row in run.trained if "num_tokens" in row)
