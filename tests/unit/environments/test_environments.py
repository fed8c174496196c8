"""``SCHEME:NAME`` stands where ``FILE.py`` does: its tasks are rows, its episodes a workflow, its options ``env``."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from areal_async.api import Policy
from areal_async.cli.main import main
from areal_async.cli.run import check_file, choose, default_config, load_run_settings
from areal_async.cli.starting.checks import check_workflow
from areal_async.config.paths import is_same_function
from areal_async.config.settings import DatasetSettings, Settings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.config.tasks import workflow_name
from areal_async.data.recorded_rows import Used, refuse_other_rows
from areal_async.data.rows import load_rows
from areal_async.environments.environment import MAX_ROW_BYTES, Environment, tasks_of
from areal_async.environments.names import SCHEMES, Scheme, environment_name, spellings
from areal_async.errors import UserError
from areal_async.process.interpreter import SHIPPED
from areal_async.protocol.types import Prompt
from areal_async.rollout.user_code.per_node import given_per_node
from areal_async.rollout.user_code.workflows import load_workflow
from tests.unit.environments.made import on_nodes

YAML = """
run: {steps: 5}
model: {path: ../model}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with settings for environments, and two kinds of them: by a name and by a path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SCHEMES, "made", Scheme("tests.unit.environments.made"))
    monkeypatch.setitem(SCHEMES, "files", Scheme("tests.unit.environments.made", is_path=True))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "environment_cpu.yaml").write_text(YAML)
    return tmp_path


def settings_of(*words: str, spec: str = "made:a", config: str = "configs/environment_cpu.yaml") -> Settings:
    return load_run_settings(Path(config), spec, words)


def rows_of(settings: Settings) -> list[dict[str, Any]]:
    return [*load_rows(settings.dataset_of(settings.tasks[0]))]


class Listed(Environment):
    """Tasks that a test lists."""

    def __init__(self, *rows: Mapping[str, Any]) -> None:
        self._rows = rows

    def rows(self) -> Iterator[Mapping[str, Any]]:
        yield from self._rows

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("spec", "token"),
    [
        ("made:Frozen Lake-v1", "Frozen_Lake-v1"),
        ("made:owner/name", "owner_name"),
        ("made:http://localhost:8000/echo", "localhost_8000_echo"),
        ("files:/data/terminal tasks/", "terminal_tasks"),
        ("made:" + "x" * 99, "x" * 64),
        ("made:???", "made"),
    ],
)
def test_an_environment_has_a_name_that_a_subject_can_have(spec: str, token: str) -> None:
    assert workflow_name(spec) == token


@pytest.mark.parametrize("spec", ["workflows/made.py", "made.py:a", "nobody:a", "made:", "made", "./made:a"])
def test_a_file_is_no_environment(spec: str) -> None:
    assert environment_name(spec) is None


def test_a_run_of_an_environment_takes_its_tasks_and_its_name() -> None:
    settings = settings_of("--env.first", "3")

    assert (settings.run.name, settings.tasks[0].workflow) == ("a", "made:a")
    assert [(row["task_id"], row["number"], len(row["sha256"])) for row in rows_of(settings)] == [
        ("a-3", 3, 64),
        ("a-4", 4, 64),
    ]


def test_rows_that_the_user_gives_are_taken_instead() -> None:
    assert rows_of(settings_of("--tasks.0.dataset.seeds", "[3, 5]")) == [{"seed": 3}, {"seed": 4}]


def test_options_of_a_task_go_over_those_of_the_run_and_others_of_rows_over_both(place: Path) -> None:
    (place / "two.yaml").write_text(
        "env: {first: 1, count: 3, nested: {x: 1, y: 2}}\n"
        "tasks: [{workflow: made:a}, {workflow: made:b, env: {first: 5, nested: {y: 3}},\n"
        "         eval: {dataset: {environment: made:b, env: {count: 1}}}}]\n"
    )

    settings = load_settings(Path("two.yaml"))

    a, b = settings.tasks
    assert settings.env_of(a) == {"first": 1, "count": 3, "nested": {"x": 1, "y": 2}}
    assert settings.env_of(b) == {"first": 5, "count": 3, "nested": {"x": 1, "y": 3}}
    assert [dataset.env for _, dataset, _ in settings.held_out] == [{**settings.env_of(b), "count": 1}]


def test_options_and_paths_come_back_as_they_were_recorded_wherever_the_run_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "tasks").mkdir()
    (place / "configs" / "here.yaml").write_text(
        "tasks: [{workflow: 'files:../tasks', env: {folder: ../tasks, first: 7, nested: {x: 1}}}]\n"
    )
    settings = load_settings(Path("configs/here.yaml"))
    (place / "recorded.yaml").write_text(dump_settings(settings))
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")

    again = load_settings(place / "recorded.yaml", use_environment=False)

    there = str(place.resolve() / "tasks")
    assert again.tasks[0].workflow == again.tasks[0].dataset.environment == f"files:{there}"
    assert again.tasks[0].env == {"folder": there, "first": 7, "nested": {"x": 1}}
    assert is_same_function(again.tasks[0].workflow, "files:../tasks")
    assert not is_same_function(again.tasks[0].workflow, "../tasks")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env.fist", "3"], "made:a: got env.fist, which it does not have, need any of first, count,"),
        (["--env.first", "three"], "made:a: env.first: got 'three': Input should be a valid integer"),
        (["--env.folder", "x" * 70_000], "env: got 70014 bytes, need at most 65536"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_starts(words: list[str], sentence: str) -> None:
    def check() -> None:
        settings = settings_of(*words)
        check_workflow("made:a", settings.env_of(settings.tasks[0]))

    with pytest.raises(UserError, match=re.escape(sentence)):
        check()


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "made", Scheme("tests.unit.environments.made", package="nowhere_at_all", extra="gym"))

    with pytest.raises(UserError, match=r"made:a: needs the package nowhere_at_all, .*'areal-async\[gym\]'"):
        check_workflow("made:a")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"x": 1}], "task 0 has the id None, need a text"),
        ([{"task_id": "a"}, {"task_id": "a"}], "task 1 has the id 'a' of another"),
        ([{"task_id": "a", "x": "y" * MAX_ROW_BYTES}], "task a takes 1,048,674 bytes as a row"),
        ([{"task_id": "a" * 513}], "need a text of 1 to 512"),
    ],
)
def test_tasks_that_a_run_cannot_hold_are_refused(rows: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        list(tasks_of(Listed(*rows), what="listed"))


def test_other_tasks_or_another_order_are_refused_when_a_run_goes_on(place: Path) -> None:
    source = DatasetSettings(environment="made:a", env={"count": 3})
    rows = load_rows(source)
    file = place / "rows.json"
    refuse_other_rows(file, [Used("tasks.0.dataset", source, rows)], run="a")

    refuse_other_rows(file, [Used("tasks.0.dataset", source, rows)], run="a")
    with pytest.raises(UserError, match=r"\(task 0 was a-0, is a-1\)"):
        refuse_other_rows(file, [Used("tasks.0.dataset", source, rows.select([1, 0, 2]))], run="a")
    changed = load_rows(source).map(lambda row: row | {"sha256": "0" * 64} if row["number"] == 1 else row)
    with pytest.raises(UserError, match=r"\(task 1, a-1, has another content\)"):
        refuse_other_rows(file, [Used("tasks.0.dataset", source, changed)], run="a")


def test_what_a_node_needs_is_entered_once_and_left(place: Path) -> None:
    import anyio

    on_nodes.clear()
    workflow = load_workflow("made:a", env={"first": 1})

    async def hold() -> None:
        held: AbstractAsyncContextManager[Any] = given_per_node(
            {"a": workflow, "again": workflow}, deadline_s=10, waiter="node", tell=print
        )
        async with held as given:
            assert on_nodes == ["enter a"]
            assert given["a"].keywords["environment"] is given["again"].keywords["environment"]  # type: ignore[attr-defined]

    anyio.run(hold)
    assert on_nodes == ["enter a", "leave a"]


def test_the_settings_are_those_of_its_own_name_or_those_for_any(place: Path) -> None:
    assert default_config("made:B-v1", has_gpu=False) == Path("configs/environment_cpu.yaml")
    (place / "configs" / "b-v1_cpu.yaml").write_text(YAML)

    (place / "configs" / "environment_cpu.yaml").unlink()
    assert default_config("made:C-v1", has_gpu=False) == SHIPPED / "configs/environment_cpu.yaml"
    assert default_config("made:B-v1", has_gpu=False) == Path("configs/b-v1_cpu.yaml")
    assert default_config("made:B-v1", has_gpu=True) == SHIPPED / "configs/environment.yaml"
    assert {(SHIPPED / "configs" / f"environment{kind}.yaml").is_file() for kind in ("", "_cpu")} == {True}


def test_another_workflows_rows_are_not_taken_for_its_own(place: Path) -> None:
    (place / "one.yaml").write_text("tasks: [{workflow: w.py, dataset: {path: x}}]\n")

    with pytest.raises(UserError, match="got made:a, but one.yaml has the tasks w.py"):
        settings_of(config="one.yaml")
    with pytest.raises(UserError, match="env: got options with no environment among the tasks"):
        load_settings(Path("one.yaml"), ["--env.first", "1"])


def test_a_run_that_goes_on_keeps_its_options(place: Path) -> None:
    def ask(*words: str) -> Settings:
        chosen = choose(argparse.Namespace(file="made:a", config=None, fresh=False), words, has_gpu=False)
        if not chosen.directory.exists:
            chosen.directory.write_settings(chosen.settings)
            assert chosen.start.said is not None
            chosen.directory.write_said(chosen.start.said)
        return chosen.settings

    begun = ask("--env.first", "5")

    assert ask() == begun
    with pytest.raises(UserError, match=r"env.first was 5, is 6; a run that goes on keeps that: it says which data"):
        ask("--env.first", "6")


def test_a_folder_of_tasks_may_have_moved_under_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.config.paths.SCHEMES", SCHEMES)

    def ask(*words: str, file: str | None) -> Settings:
        chosen = choose(argparse.Namespace(file=file, config=None, fresh=False), words, has_gpu=False)
        if not chosen.directory.exists:
            chosen.directory.write_settings(chosen.settings)
            assert chosen.start.said is not None
            chosen.directory.write_said(chosen.start.said)
        return chosen.settings

    (place / "tasks").mkdir(exist_ok=True)
    begun = ask(file="files:tasks")
    assert ask("--run.name", "tasks", file=None) == begun

    (place / "elsewhere").mkdir()
    (place / "tasks").rename(place / "elsewhere" / "tasks")
    moved = ask(file="files:elsewhere/tasks").tasks[0]

    assert (moved.workflow, moved.dataset.environment) == ("files:elsewhere/tasks",) * 2
    with pytest.raises(UserError, match=r"tasks.0.workflow was '.*/tasks', is '.*/other'"):
        ask("--run.name", "tasks", file="files:other")


def test_an_option_that_names_a_python_file_is_a_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "configs" / "x.yaml").write_text(
        "tasks: [{workflow: 'made:a', env: {folder: '../agents/one.py:solve'}}]\n"
    )

    assert load_settings(Path("configs/x.yaml")).tasks[0].env == {"folder": "agents/one.py:solve"}
    given = load_settings(Path("configs/x.yaml"), ["--env.folder", "agents/two.py"])
    recorded = load_settings(_written(place / "recorded.yaml", dump_settings(given)))

    monkeypatch.chdir(place / "configs")
    assert load_settings(place / "recorded.yaml").env == {"folder": f"{place}/agents/two.py"}
    assert recorded.env == {"folder": "agents/two.py"}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_is_nowhere_is_said_with_the_kinds_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nobody:a"]) == 2
    assert f"or an environment: {spellings()}" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no gone; name a file or a folder"):
        check_file("files:gone")
