"""Steps are started, ended and explained as children of this host are, through srun's and scancel's command lines.

There is no Slurm here: two shell scripts stand in for its programs, and show the command lines and the life of a step
alone. What a cluster does with them is not shown.
"""

import os
import signal
import sys
from pathlib import Path
from typing import get_args

import anyio
import pytest

from areal_async.cli.run import BACKENDS
from areal_async.errors import UserError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.crew import run_together
from areal_async.launch.slurm import SlurmBackend, SlurmProcess, step_command
from areal_async.settings import LaunchSettings
from tests.brokers import until

pytestmark = pytest.mark.anyio

SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_STEP_ID=7 "$@"
status=$?
[ $status = 0 ] || echo "srun: error: task 0: ended with $status" >&2
exit $status
"""
SCANCEL = """#!/bin/sh
echo "$@" >> "$CANCELLED"
kill -s "${1#--signal=}" $(cut -d' ' -f2 "$STEP")
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmBackend:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURMD_NODENAME", "host7")
    monkeypatch.setenv("CANCELLED", str(tmp_path / "cancelled"))
    monkeypatch.setenv("STEP", str(tmp_path / ".child.step"))
    return SlurmBackend()


def _spec(code: str, tmp_path: Path) -> ProcessSpec:
    command = (sys.executable, "-c", code)
    return ProcessSpec(name="child", command=command, environment={"GREETING": "hello"}, output=tmp_path / "out")


async def _started(backend: SlurmBackend, code: str, tmp_path: Path) -> SlurmProcess:
    process = await backend.start(_spec(code, tmp_path))
    await until(lambda: (tmp_path / "out").read_text().startswith("begun"))
    return process


def test_a_step_is_one_task_on_the_launchers_host_beside_others(tmp_path: Path) -> None:
    command = step_command(_spec("pass", tmp_path), host="host7", identity=tmp_path / "id")

    assert command[:6] == ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=host7", "--job-name=child"]
    # In the step itself: Slurm sets there which GPUs are visible, whatever srun was given.
    assert command[-6:] == [str(tmp_path / "id"), "env", "GREETING=hello", sys.executable, "-c", "pass"]


async def test_a_step_that_fails_is_explained_by_its_own_last_sentence(backend: SlurmBackend, tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(os.environ['GREETING'])"

    death = await run_together([_spec(code, tmp_path)], backend, on_start=lambda _: None)

    assert death is not None
    assert (death.status, death.sentence) == (1, "hello")
    assert "srun: error" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(("end", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
async def test_a_step_is_ended_by_its_own_id_and_its_status_names_the_signal(
    backend: SlurmBackend, tmp_path: Path, end: str, number: signal.Signals
) -> None:
    process = await _started(backend, "print('begun', flush=True); import time; time.sleep(60)", tmp_path)

    getattr(process, end)()
    with anyio.fail_after(10):
        status = await process.wait()

    assert status == -number
    assert (tmp_path / "cancelled").read_text() == f"--signal={number.name[3:]} 41.7\n"
    getattr(process, end)()  # has ended: nobody is asked again
    assert (tmp_path / "cancelled").read_text().count("\n") == 1


async def test_a_run_takes_the_backend_that_its_settings_name() -> None:
    assert set(BACKENDS) == set(get_args(LaunchSettings.model_fields["backend"].annotation))
    assert BACKENDS["slurm"] is SlurmBackend


async def test_outside_of_an_allocation_or_without_its_programs_it_is_refused(
    backend: SlurmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="slurm on a host outside of the allocation"):
        SlurmBackend({"SLURM_JOB_ID": "41"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no program srun"):
        SlurmBackend()
