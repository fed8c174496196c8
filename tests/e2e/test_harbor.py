"""Harbor's task folders in whole runs: scored as their tests say, tried again after a kill, and no others later."""

import os
import shutil
from pathlib import Path

import pytest

from areal_async.sandbox.control_group import PREFIX
from tests.e2e.test_rollback import assert_proved
from tests.e2e.test_run import Run, assert_accounts, processes_with, role_processes
from tests.unit.environments.harbor_tasks import HALF, make_tasks

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

MARK = "86399.25"
"""Seconds of a sleep by which what a box has running is found."""
AGENT = f'''
import os
from pathlib import Path

from areal_async.process.failpoints import failpoint


async def some(prompt, policy, box):
    """Solve half of the tasks, and half of each of the others."""
    await policy.chat([{{"role": "user", "content": prompt["instruction"]}}], max_new_tokens=2)
    await box.run("sleep {MARK} & disown")
    with Path(__file__).with_name("pids").open("a") as pids:
        print(os.getpid(), file=pids)
    failpoint("agent.working")
    whole = int(prompt["task_id"][-2:]) % 2
    await box.run("bash -c 'python3 solver.py; wc -l < numbers.txt > count.txt'" if whole else {HALF!r})
'''


def harbor_run(folder: Path, num_steps: int) -> Run:
    (folder / "some.py").write_text(AGENT)
    return Run(
        folder, "tasks", config="configs/environment_cpu.yaml", run__steps=num_steps, env__agent=folder / "some.py",
        rollout__group_size=2, rollout__min_group_size=1,
    )  # fmt: skip


def control_groups_of(pids: Path) -> list[str]:
    """Those of boxes that processes have made: by their names, for others run beside them."""
    numbers = set(pids.read_text().split())
    names = (os.path.basename(path) for path, _, _ in os.walk("/sys/fs/cgroup"))
    return [one for one in names if one.startswith(PREFIX) and one.removeprefix(PREFIX).partition("-")[0] in numbers]


def test_a_node_killed_in_mid_task_tries_it_again_and_other_tasks_are_refused_later(tmp_path: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks")
    run = harbor_run(tmp_path, 2)
    run.faults = "agent.working:3:kill"

    ended = run.finish(workflow=f"harbor:{tasks}")

    assert ended.returncode == 0, ended.stdout
    assert run.has_fired("agent.working")
    assert "node-0 ended by SIGKILL" in ended.stdout, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    assert_proved(run)
    assert {row["reward"] for row in run.trained} == {0.5, 1.0}
    assert all(0.5 <= line["reward_mean"] <= 1.0 and line["failed"] == 0 for line in run.lines)
    assert (processes_with(MARK), role_processes(run, "node")) == ([], [])
    assert control_groups_of(tmp_path / "pids") == []

    (tasks / "sum-04").rename(tasks / "sum-four")
    renamed = run.finish("--run.steps", "3", workflow=f"harbor:{tasks}")
    (tasks / "sum-four").rename(tasks / "sum-04")
    expected = tasks / "sum-07/tests/expected.json"
    text = expected.read_text()
    expected.write_text("{}")
    changed = run.finish("--run.steps", "3", workflow=f"harbor:{tasks}")
    expected.write_text(text)
    for refused, told in ((renamed, "task 4 was sum-04, is sum-05"), (changed, "task 7, sum-07, has another content")):
        assert refused.returncode != 0
        assert f"that the run has recorded at its start ({told})" in refused.stdout
        assert "Traceback" not in refused.stdout
    assert len(run.lines) == 2

    moved = tmp_path / "elsewhere" / "tasks"
    shutil.move(tasks, moved)
    again = run.finish("--run.steps", "3", workflow=f"harbor:{moved}")
    assert again.returncode == 0, again.stdout
    assert_accounts(run, num_steps=3, max_staleness=2)
    assert_proved(run)


def test_the_agent_that_ships_is_trained_with_the_settings_that_ship(tmp_path: Path) -> None:
    """The tiny model knows nothing of shells: what it does there is played, scored and trained all the same."""
    tasks = make_tasks(tmp_path / "tasks", 4)
    run = Run(tmp_path, "tasks", config="configs/environment_cpu.yaml", run__steps=2, rollout__group_size=2)

    ended = run.finish("--rollout.min_group_size", "1", workflow=f"harbor:{tasks}")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    assert_proved(run)
    assert {row["reward"] for row in run.trained} == {0.0}
    assert all(line["failed"] == 0 for line in run.lines)
