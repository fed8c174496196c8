"""Before anything is started, the torch of both environments says whether it sees the GPUs that it would be given."""

import sys
from pathlib import Path

import pytest

from areal_async.config.settings import InferenceSettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.launch.interpreters import _check_nccl, check_interpreters


def interpreter(path: Path, *lines: str, status: int = 0) -> Path:
    """Make an interpreter that prints something, whatever it is to run, and notes which GPUs it was given."""
    said = "\n".join(lines)
    path.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" > "$0.gpus"\ncat <<"end"\n{said}\nend\nexit {status}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the trainer's interpreter, which sees four GPUs."""
    path = interpreter(tmp_path / "trainer", '{"torch": "2.13.0+cu130", "num_gpus": 4}')
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def settings_of(server: Path) -> Settings:
    inference = InferenceSettings(python=server, num_servers=2, tensor_parallel=2)
    return Settings(inference=inference, trainer=TrainerSettings(num_ranks=4))


def test_each_environment_is_asked_for_the_gpus_of_one_of_its_processes(tmp_path: Path, trainer: Path) -> None:
    server = interpreter(tmp_path / "server", '{"torch": "2.14.1+cu130", "num_gpus": 2}')

    told = check_interpreters(settings_of(server), tuple("01234567"))

    assert Path(f"{trainer}.gpus").read_text() == "4,5,6,7\n"
    assert Path(f"{server}.gpus").read_text() == "0,1\n"
    assert told == [
        f"torch 2.13.0+cu130 of the trainer ({trainer}) sees 4 of GPUs 4,5,6,7",
        f"torch 2.14.1+cu130 of the inference server ({server}) sees 2 of GPUs 0,1",
    ]


def test_an_environment_whose_torch_sees_too_few_is_named(tmp_path: Path, trainer: Path) -> None:
    server = interpreter(tmp_path / "server", '{"torch": "2.14.1+cpu", "num_gpus": 0}')

    with pytest.raises(UserError) as raised:
        check_interpreters(settings_of(server), tuple("01234567"))

    said = f"the inference server ({server}): got GPUs 0,1, of which torch 2.14.1+cpu sees 0, need 2; install a build"
    assert str(raised.value).startswith(said)


def test_both_environments_are_asked_for_the_gpu_that_they_share(tmp_path: Path, trainer: Path) -> None:
    server = interpreter(tmp_path / "server", '{"torch": "2.14.1+cu130", "num_gpus": 1}')

    check_interpreters(Settings(inference=InferenceSettings(python=server, colocate="split")), ("3",))

    assert [Path(f"{asked}.gpus").read_text() for asked in (trainer, server)] == ["3\n", "3\n"]


@pytest.mark.parametrize(
    ("lines", "status"), [(["no such module"], 0), ([""], 1), (['{"torch": 1}'], 0), (['{"torch": "2"}', "{}"], 0)]
)
def test_an_environment_that_cannot_be_asked_is_named(
    tmp_path: Path, trainer: Path, lines: list[str], status: int
) -> None:
    server = interpreter(tmp_path / "server", *lines, status=status)

    with pytest.raises(UserError, match=r"the inference server \(\S+\): does not say what its torch can use: .+; inst"):
        check_interpreters(settings_of(server), tuple("01234567"))


def test_only_the_trainer_is_asked_on_the_first_of_several_hosts_and_nobody_without_gpus(trainer: Path) -> None:
    nowhere = settings_of(Path("/nowhere/python"))

    assert len(check_interpreters(nowhere, tuple("0123"), num_hosts=2)) == 1
    assert check_interpreters(nowhere, ()) == []


def environment(directory: Path, nccl: str | None) -> Path:
    """Make an environment of nothing but what is said to be installed, with a real interpreter."""
    if nccl is not None:
        folder = directory / f"nvidia_nccl_cu13-{nccl}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {nccl}\n")
    path = directory.with_suffix(".python")
    path.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [("2.29.7", "2.29.7", ["nccl 2.29.7 of both the trainer and the inference server"]), (None, "2.29.7", [])],
)
def test_weights_are_broadcast_where_nobody_knows_of_two_versions_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str | None, theirs: str, told: list[str]
) -> None:
    server = environment(tmp_path / "server", theirs)
    monkeypatch.setattr(sys, "executable", str(environment(tmp_path / "trainer", ours)))

    assert _check_nccl(Settings(inference=InferenceSettings(python=server))) == told


def test_weights_are_not_broadcast_between_two_versions_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = environment(tmp_path / "server", "2.30.7")
    trainer = environment(tmp_path / "trainer", "2.29.7")
    monkeypatch.setattr(sys, "executable", str(trainer))
    inference = InferenceSettings(python=server, weight_transfer="distributed")

    with pytest.raises(UserError) as raised:
        check_interpreters(Settings(inference=inference), ("0", "1"))

    assert str(raised.value) == (
        f"inference.weight_transfer: got distributed between nccl 2.29.7 of the trainer ({trainer}) and nccl 2.30.7 of "
        f"the inference server ({server}), need one version; install the same nvidia-nccl in both, or take disk"
    )


def test_this_torch_counts_what_it_is_given() -> None:
    """The real question to a real interpreter: no host has a GPU of this name."""
    alone = Settings(trainer=TrainerSettings(num_ranks=1))

    with pytest.raises(UserError, match=r"the trainer \(\S+\): got GPUs GPU-none, of which torch 2\S+ sees 0, need 1;"):
        check_interpreters(alone, ("GPU-none",), num_hosts=2)
