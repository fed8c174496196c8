"""One launcher at a time; what is removed was a run's, and a start that came to nothing leaves nothing."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from areal_async.bus import HeldError
from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.errors import PipelineError, UserError
from areal_async.launch.run_directory import LiveError, RunDirectory

TASKS = "[{workflow: workflows/gsm8k.py, dataset: {path: rows.jsonl}}]"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "a")


def _settings(*overrides: str) -> Settings:
    return load_settings(None, ["--run.name", "a", "--tasks", TASKS, *overrides], use_environment=False)


def test_second_launcher_is_refused_with_the_pid_of_the_first(directory: RunDirectory) -> None:
    with directory.locked("a"):
        with pytest.raises(UserError, match=f"run a: already running in process {os.getpid()}; stop it"):
            with directory.locked("a"):
                pass

    with directory.locked("a"):
        pass


def test_a_run_is_live_while_a_launcher_has_it_and_not_for_one_who_looks_into_it(directory: RunDirectory) -> None:
    assert not directory.is_live
    with directory.locked("a"):
        assert directory.is_live
    assert not directory.is_live
    with directory.locked("a", is_visit=True):
        assert not directory.is_live
        with pytest.raises(HeldError, match=f"run a: process {os.getpid()} looks into it; try again"):
            with directory.locked("a"):
                pass


@pytest.fixture
def at_each_lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done at each moment at which a lock was just taken, or refused."""
    take = fcntl.flock

    def arrange(look: Callable[[], None]) -> None:
        def flock(file: int, operation: int) -> None:
            with monkeypatch.context() as during:
                during.setattr("fcntl.flock", take)
                try:
                    take(file, operation)
                finally:
                    look()

        monkeypatch.setattr("fcntl.flock", flock)

    return arrange


def test_a_visitor_is_taken_for_a_launcher_at_no_moment(
    directory: RunDirectory, at_each_lock: Callable[[Callable[[], None]], None]
) -> None:
    """Whoever has held the directory before."""
    errors: list[HeldError] = []

    def look() -> None:
        assert not directory.is_live
        try:
            with directory.locked("a"):
                pass
        except HeldError as exc:
            errors.append(exc)

    with directory.locked("a"):
        assert directory.is_live
    at_each_lock(look)
    with directory.locked("a", is_visit=True):
        pass

    assert errors
    assert not any(isinstance(error, LiveError) for error in errors)


def test_a_launcher_is_one_from_the_moment_that_it_has_both_locks(
    directory: RunDirectory, at_each_lock: Callable[[Callable[[], None]], None]
) -> None:
    """Whoever has held the directory before; who finds it live is told the process."""
    found: list[tuple[bool, str]] = []

    def look() -> None:
        error = ""
        is_live = directory.is_live
        with suppress(HeldError):
            try:
                with directory.locked("a"):
                    pass
            except LiveError as exc:
                error = str(exc)
                raise
        found.append((is_live, error))

    with directory.locked("a", is_visit=True):
        pass
    at_each_lock(look)
    with directory.locked("a"):
        pass

    running = f"run a: already running in process {os.getpid()}; stop it, or choose another --run.name"
    assert found == [(False, ""), (True, running)]


def test_settings_and_address_are_read_as_they_were_written(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_ASYNC_RUN__STEPS", "99")
    settings = _settings("--run.steps", "7")

    directory.write_settings(settings)
    directory.write_bus_url("nats://127.0.0.1:4222")

    assert directory.read_settings() == settings
    assert directory.read_bus_url() == "nats://127.0.0.1:4222"


def test_checkpointed_step_is_that_of_the_newest_lineage_and_no_half_written_one(directory: RunDirectory) -> None:
    """It may be less than one before: where the run has gone back."""
    assert directory.checkpointed_step == 0
    for name in ("1-8", "1-20", "3-10", ".3-30.partial", "notes"):
        (directory.path / "checkpoints" / name).mkdir(parents=True)

    assert directory.checkpointed_step == 10


def test_run_that_was_never_started_is_refused(directory: RunDirectory) -> None:
    with pytest.raises(UserError, match="start the run first"):
        directory.read_bus_url()
    with pytest.raises(UserError, match="config.yaml"):
        directory.read_settings()
    assert not directory.exists


def test_clear_removes_all_but_the_locks(directory: RunDirectory) -> None:
    with directory.locked("a"):
        directory.write_settings(_settings())
        directory.write_bus_url("x")
        (directory.path / "link").symlink_to(directory.path.parent)

        directory.clear()

        assert sorted(path.name for path in directory.path.iterdir()) == ["launcher.lock", "run.lock"]


def test_clear_leaves_a_directory_that_no_run_made(directory: RunDirectory) -> None:
    with directory.locked("a"):
        (directory.path / "thesis.tex").write_text("precious")

        with pytest.raises(UserError, match="holds files but no run"):
            directory.clear()

    assert (directory.path / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["answers-1.jsonl", "feedback-1.jsonl"])
def test_clear_leaves_what_users_were_answered(name: str, directory: RunDirectory) -> None:
    with directory.locked("a"):
        directory.write_settings(_settings())
        (directory.path / "served").mkdir()
        (directory.path / "served" / name).touch()

        with pytest.raises(UserError, match="with recorded answers or feedback of users"):
            directory.clear()
        assert directory.exists
        (directory.path / "served" / name).rename(directory.path.parent / name)
        directory.clear()

    assert not directory.exists


def _start_in_vain(directory: RunDirectory, error: BaseException) -> None:
    with directory.locked("a"), directory.first_start():
        directory.write_settings(_settings())
        directory.logs.mkdir()
        (directory.logs / "s.log").touch()
        raise error


def test_a_first_start_that_comes_to_nothing_leaves_nothing(directory: RunDirectory) -> None:
    for _ in range(2):  # the name is free again
        with pytest.raises(UserError):
            _start_in_vain(directory, UserError("model.path: got nothing"))

        assert not directory.path.exists()


@pytest.mark.parametrize(
    "error", [PipelineError("node-0 died 6 times"), UserError("server 0-0 ended: its log is /there/a/logs/s.log")]
)
def test_a_first_start_leaves_the_logs_that_tell_of_its_failure(directory: RunDirectory, error: PipelineError) -> None:
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        _start_in_vain(directory, ExceptionGroup("tasks", [error]))

    names = sorted(path.name for path in directory.path.iterdir())
    assert names == ["launcher.lock", "logs", "run.lock"]
    assert not directory.exists
    with directory.locked("a"):
        directory.clear()
        assert sorted(path.name for path in directory.path.iterdir()) == ["launcher.lock", "run.lock"]


def test_a_first_start_leaves_what_others_have_put_there_and_all_of_a_run_that_has_begun(
    directory: RunDirectory,
) -> None:
    directory.path.mkdir(parents=True)
    (directory.path / "thesis.tex").write_text("precious")
    with directory.locked("a"):
        with directory.first_start():
            directory.write_settings(_settings())
        assert not directory.exists

        with directory.first_start() as start:
            directory.write_settings(_settings())
            start.has_begun = True
        assert directory.exists

    assert (directory.path / "thesis.tex").read_text() == "precious"


def test_who_had_the_lock_file_of_a_directory_that_went_away_has_no_lock(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = fcntl.flock

    def flock(file: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", take)
        shutil.rmtree(directory.path)  # it has opened the file, and not locked it yet
        take(file, operation)

    monkeypatch.setattr("fcntl.flock", flock)

    with pytest.raises(HeldError, match="try again"), directory.locked("a"):
        pass
    with directory.locked("a"):
        pass


def test_what_was_exported_at_an_end_gets_the_name_of_its_version(directory: RunDirectory) -> None:
    for name in ("checkpoints/1-2", "checkpoints/1-3", "model", "model_best", "adapter", "adapter_1-3"):
        (directory.path / name).mkdir(parents=True)
    (directory.path / "checkpoints" / "best").symlink_to("1-2")

    kept = directory.set_models_aside()

    assert kept == ["model_1-3", "adapter_1-3", "model_1-2"]
    names = sorted(path.name for path in directory.path.iterdir())
    assert names == ["adapter_1-3", "checkpoints", "model_1-2", "model_1-3"]


@pytest.mark.parametrize("path", ["/proc/foo/a", "/dev/null/a"])
def test_a_directory_that_cannot_be_made_is_one_sentence(path: str) -> None:
    with (
        pytest.raises(UserError, match=f"run a: got the directory {path}, need one that can be written: "),
        RunDirectory(Path(path)).locked("a"),
    ):
        pass
