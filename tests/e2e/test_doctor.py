"""The doctor on a real run that was killed: clean as it is, and every damage done to it is found, alone and by name.

The run is killed when all of it waits for a server that was stopped, and has said so.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_async.doctor.audit.reconciliation import IN_TRAINING, SlotFate
from areal_async.protocol.types import NOT_SAMPLED, Version
from tests.e2e.scene import server_pid
from tests.e2e.test_run import Run, continue_trainers, events, role_processes, said_by, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

PROMISES = ("P1", "P2", "P3", "P4", "P5", "P7")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose server was stopped after its seventh step, and then its launcher killed.

    What the server had answered makes a step or two more, and no second checkpoint.
    """
    settings = {"trainer__checkpoint_every_steps": 6, "run__watchdog_s": 3}
    run = Run(tmp_path_factory.mktemp("doctor"), "killed", run__steps=40, **settings)
    run.faults = "trainer.before_step:8:stop"
    with run.start() as process:
        run.wait_for_fault("trainer.before_step", process)
        num_before = len(_stalls(run))  # a server that starts on a busy machine may have been named as well
        os.kill(server_pid(run), signal.SIGSTOP)
        continue_trainers(run)
        wait_until(lambda: len(_stalls(run)) > num_before, "the server to be named")
        broker = Path("/proc", (run.directory / "bus" / "nats.pid").read_text().strip())
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(role_processes(run, verb) for verb in ("controller", "node", "trainer")), "all ended")
    wait_until(lambda: not broker.exists(), "the broker to have written what it holds")
    return run


@pytest.fixture
def run_directory(killed: Run, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(killed.directory, tmp_path / "killed", symlinks=True))


def diagnose(directory: Path, *, status: int) -> dict[str, Any]:
    ended = said_by("doctor", directory, "--json")
    assert ended.returncode == status, ended.stdout + ended.stderr
    diagnosis: dict[str, Any] = json.loads(ended.stdout)
    return diagnosis


@pytest.fixture(scope="module")
def undamaged(killed: Run) -> dict[str, Any]:
    """What the doctor says of the run before anything is done to it."""
    return diagnose(killed.directory, status=0)


def findings(diagnosis: dict[str, Any], kind: str) -> list[str]:
    return sorted(one["id"] for ruling in diagnosis["rulings"] for one in ruling["findings"] if one["kind"] == kind)


def archive(directory: Path) -> list[Path]:
    return sorted((directory / "trajectories").glob("step-*.parquet"))


def _stalls(run: Run) -> list[dict[str, Any]]:
    """What was said of the server."""
    stalls = events(run, "controller", "run.stalled")
    return [one for one in stalls if one["culprit"] == "server 0-0"]


def test_a_server_that_is_stopped_is_named_as_the_one_that_all_wait_for(killed: Run) -> None:
    sentence = _stalls(killed)[-1]["sentence"]

    assert sentence.startswith("trainer waits for ")
    assert ", where nothing has moved for " in sentence


def test_a_killed_run_keeps_every_promise(undamaged: dict[str, Any]) -> None:
    assert {one["promise"]: one["verdict"] for one in undamaged["rulings"]} == dict.fromkeys(PROMISES, "proved")
    assert not undamaged["is_live"]
    assert undamaged["slots"]["acknowledged"] > undamaged["slots"]["trained"] > 0
    assert undamaged["slots"]["in the broker"] > 0
    assert undamaged["notes"] == []


def test_destroyed_message_blocks_are_a_loss_of_what_was_not_settled_and_of_nothing_else(
    run_directory: Path, undamaged: dict[str, Any]
) -> None:
    (block,) = (run_directory / "bus").rglob("AREAL_killed_TRAJECTORIES/msgs/*.blk")

    block.unlink()

    diagnosis = diagnose(run_directory, status=1)
    num_unsettled = sum(undamaged["slots"].get(fate, 0) for fate in (SlotFate.STORED, IN_TRAINING))
    assert diagnosis["slots"]["lost"] == num_unsettled > 0
    assert len(findings(diagnosis, "lost")) == num_unsettled
    assert [one["promise"] for one in diagnosis["rulings"] if one["verdict"] == "refuted"] == ["P1"]


def test_a_slot_in_the_archive_of_two_steps_is_found(run_directory: Path) -> None:
    first, second = archive(run_directory)[:2]
    planted = pq.read_table(first).slice(0, 1)
    step = pa.array([2], pa.int64())
    doubled = pa.concat_tables([pq.read_table(second), planted.set_column(0, planted.schema.field(0), step)])
    pq.write_table(doubled, second)

    diagnosis = diagnose(run_directory, status=1)

    row = planted.to_pylist()[0]
    assert findings(diagnosis, "twice") == [f"{row['group_id']}.{row['sibling']}"]


def test_an_over_age_token_is_found_and_so_are_one_from_the_future_and_one_without_a_version(
    run_directory: Path,
) -> None:
    path = archive(run_directory)[4]  # of step 5: tokens of version 0 have age 4
    table = pq.read_table(path)
    rows = table.to_pylist()
    old, future, unversioned = rows[:3]
    for row, version in ((old, Version(1, 0)), (future, Version(1, 5))):
        row["versions"][0][-1] = version.pack()
    old["oldest"], future["newest"] = "1-0", "1-5"
    unversioned["versions"][0][-1] = NOT_SAMPLED
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)

    diagnosis = diagnose(run_directory, status=1)

    assert findings(diagnosis, "over age") == sorted(f"{row['group_id']}.{row['sibling']}" for row in (old, future))
    assert findings(diagnosis, "unversioned") == [f"{unversioned['group_id']}.{unversioned['sibling']}"]
