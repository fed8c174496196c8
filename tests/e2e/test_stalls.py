"""A run that stands still says by id who holds it up, has everybody write where they stand, and ends if it is told to.

A server that stands still: ``test_doctor.py``, where the run that waits for it is killed then.
"""

from pathlib import Path

import pytest

from tests.e2e.test_run import Run, events

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

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


def test_a_workflow_that_awaits_for_ever_is_named_by_its_slot_and_ends_a_run_that_is_told_to_end(
    tmp_path: Path,
) -> None:
    workflow = tmp_path / "hanging.py"
    workflow.write_text(HANGING)
    run = Run(
        tmp_path, "run", run__watchdog_s=10, run__on_stall="end", eval__limit=2, rollout__batch_groups=2,
        rollout__group_size=4, rollout__min_group_size=2, rollout__sampling__max_new_tokens=8,
        rollout__episode_deadline_s=600,
    )  # fmt: skip

    ended = run.finish(workflow=str(workflow))

    stall = events(run, "controller", "run.stalled")[-1]
    group_id = (tmp_path / "hangs").read_text()
    assert stall["culprit"].startswith(f"slot {group_id}.")
    assert f"group {group_id}, which is leased by node 0 and waits for the workflow of slot" in stall["sentence"]
    assert "run.stalled for" in ended.stdout
    assert ended.returncode not in (0, 2)
    assert stall["sentence"] in ended.stdout.splitlines()[-1]
    logs = run.directory / "logs"
    assert f"{workflow}:14 hanging" in (logs / "stacks-node-0.txt").read_text()
    assert {path.name for path in logs.glob("stacks-*")} == {
        "stacks-controller.txt", "stacks-node-0.txt", "stacks-trainer-0.txt"
    }  # fmt: skip
