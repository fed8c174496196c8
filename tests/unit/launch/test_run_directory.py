"""One launcher at a time; a resumed run keeps its data; what is removed was a run's."""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from areal_async.bus import HeldError
from areal_async.errors import UserError
from areal_async.launch.run_directory import LiveError, RunDirectory
from areal_async.settings import Settings
from areal_async.settings_sources import load_settings

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


def test_checkpointed_step_is_the_newest_of_any_lineage_and_no_half_written_one(directory: RunDirectory) -> None:
    assert directory.checkpointed_step == 0
    for name in ("1-8", "1-20", "3-10", ".3-30.partial", "notes"):
        (directory.path / "checkpoints" / name).mkdir(parents=True)

    assert directory.checkpointed_step == 20


def test_run_that_was_never_started_is_refused(directory: RunDirectory) -> None:
    with pytest.raises(UserError, match="start the run first"):
        directory.read_bus_url()
    with pytest.raises(UserError, match="config.yaml"):
        directory.read_settings()
    assert not directory.exists


def test_settings_that_do_not_define_the_data_may_change(directory: RunDirectory) -> None:
    directory.write_settings(_settings())

    directory.refuse_changed_data(_settings("--run.steps", "7", "--trainer.lr", "1e-3", "--rollout.batch_groups", "3"))
    directory.refuse_changed_data(_settings("--tasks.0.ratio", "2"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--run.seed", "2"], "run.seed was 1, is 2"),
        (["--rollout.group_size", "16"], "rollout.group_size was 8, is 16"),
        (["--model.path", "other"], "model.path was 'Qwen/Qwen2.5-1.5B-Instruct', is 'other'"),
        (["--tasks.0.dataset.split", "test"], "tasks.0.dataset.split was "),
        (["--tasks.0.group_size", "16"], "tasks.0.group_size was None, is 16"),
        (["--rollout.curriculum.name", "pass_rate"], "rollout.curriculum was {'name': 'none'"),
    ],
)
def test_settings_that_define_the_data_may_not_change(directory: RunDirectory, words: list[str], name: str) -> None:
    directory.write_settings(_settings())

    with pytest.raises(UserError, match="--fresh") as caught:
        directory.refuse_changed_data(_settings(*words))

    assert name in str(caught.value)


def test_a_run_that_was_started_before_a_setting_was_there_had_its_default(directory: RunDirectory) -> None:
    directory.write_settings(_settings())
    before = yaml.safe_load(directory.config.read_text())
    del before["rollout"]["curriculum"]
    del before["tasks"][0]["group_size"]
    directory.config.write_text(yaml.safe_dump(before))

    directory.refuse_changed_data(_settings("--tasks.0.min_group_size", "2"))

    with pytest.raises(UserError, match="rollout.curriculum was"):
        directory.refuse_changed_data(_settings("--rollout.curriculum.keep", "0.5"))


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


@pytest.mark.parametrize("path", ["/proc/foo/a", "/dev/null/a"])
def test_a_directory_that_cannot_be_made_is_one_sentence(path: str) -> None:
    with (
        pytest.raises(UserError, match=f"run a: got the directory {path}, need one that can be written: "),
        RunDirectory(Path(path)).locked("a"),
    ):
        pass
