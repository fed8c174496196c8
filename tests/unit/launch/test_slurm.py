"""How Slurm is asked, and where it is refused to be; what it does then is shown with a real one, in ``tests/slurm``."""

import sys
from pathlib import Path
from typing import get_args

import pytest

from areal_async.config.settings import LaunchSettings
from areal_async.errors import UserError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.backends import BACKENDS, make_backend
from areal_async.launch.local import LocalBackend
from areal_async.launch.slurm import PROGRAMS, SlurmBackend, absent_in, step_command


def test_a_step_is_one_task_on_its_host_beside_others_and_sets_its_environment_inside(tmp_path: Path) -> None:
    spec = ProcessSpec(
        name="child", command=(sys.executable, "-c", "pass"), environment={"GREETING": "hello"}, output=None
    )

    command = step_command(spec, host="host7", identity=tmp_path / "id")

    assert {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=host7", "--job-name=child"} < set(command)
    assert command[-6:] == [str(tmp_path / "id"), "env", "GREETING=hello", sys.executable, "-c", "pass"]
    assert "--het-group=1" not in command
    assert "--het-group=1" in step_command(spec, host="host7", identity=tmp_path / "id", component=1)


def test_a_run_takes_the_backend_that_its_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(BACKENDS) == set(get_args(LaunchSettings.model_fields["backend"].annotation))
    for program in PROGRAMS:  # Slurm's, of which one answers with a name
        (tmp_path / program).write_text("#!/bin/sh\necho host7\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURMD_NODENAME", "host7")

    assert isinstance(make_backend(LaunchSettings(backend="slurm")), SlurmBackend)
    assert type(make_backend(LaunchSettings())) is LocalBackend


def test_hosts_of_a_heterogeneous_job_are_those_of_its_components_in_their_order_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in PROGRAMS:
        (tmp_path / program).write_text('#!/bin/sh\necho "$3" | tr , "\\n"\n')
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"SLURM_JOB_ID": "41", "SLURMD_NODENAME": "b", "SLURM_JOB_NODELIST": "a,b", "SLURM_HET_SIZE": "2"}
    job |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "a,b", "SLURM_JOB_NODELIST_HET_GROUP_1": "b,c"}

    assert SlurmBackend(job).hosts == ("b", "a", "c")


def test_hosts_are_gone_that_slurm_says_are_down_or_do_not_answer() -> None:
    gone = absent_in("a idle\nb down*\nc alloc*\nd mix\ne drain\nf fail\n")

    assert set(gone) == {"b", "c", "f"}
    assert gone["c"] == "Slurm says that it is alloc*"


def test_without_an_allocation_its_programs_or_their_answer_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"SLURM_JOB_ID": "41", "SLURMD_NODENAME": "host7", "SLURM_JOB_NODELIST": "host[6-7]"}

    with pytest.raises(UserError, match="slurm on a host outside of the allocation"):
        SlurmBackend({"SLURM_JOB_ID": "41"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no program srun"):
        SlurmBackend(here)
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\necho no answer from the controller >&2; exit 3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"scontrol show hostnames host\[6-7\]: .* 3, no answer from the controller"):
        SlurmBackend(here)
