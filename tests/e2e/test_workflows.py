"""Every workflow that ships runs to its end on a CPU, with its own settings and the tiny model.

``countdown`` is in ``test_run.py``, where its run is on policy too.
"""

from pathlib import Path

import pytest

from tests.e2e.test_run import Run, assert_ran_well

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


@pytest.mark.parametrize("name", ["coding", "calculator"])
def test_a_workflow_that_ships_runs_to_its_end(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, name, run__steps=2, eval__limit=4)

    ended = run.finish("--config", f"configs/{name}_cpu.yaml", workflow=f"workflows/{name}.py")

    assert ended.returncode == 0, ended.stdout
    assert [line["step"] for line in run.lines] == [1, 2]
    assert_ran_well(run)
