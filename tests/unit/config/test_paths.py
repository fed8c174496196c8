"""A path means one file, whoever reads it: relative to its YAML's folder, or to where a command was given."""

import itertools
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
import yaml

from areal_async.config.paths import is_same_function, with_real_paths
from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.settings import Settings
from areal_async.config.sft import SftSettings
from areal_async.config.sources import dump_settings, load_settings, override_settings
from areal_async.config.tree import annotation_at, leaves, path_kind, without_none
from areal_async.errors import UserError

HUB = "Qwen/Qwen2.5-0.5B"
PLACES = {
    "tasks.0.workflow": {
        "../workflows/play.py": "workflows/play.py",
        "../workflows/play.py:other": "workflows/play.py:other",
        "missing.py": "configs/missing.py",
        "/abs/play.py": "/abs/play.py",
    },
    "tasks.0.dataset.path": {
        "data/rows.jsonl": "configs/data/rows.jsonl",
        "data/missing.jsonl": "configs/data/missing.jsonl",
        "data": "./configs/data",
        "openai/gsm8k": "openai/gsm8k",
        "~/rows": "{home}/rows",
        "nowhere/": "./configs/nowhere",
    },
    "model.path": {
        "../models/tiny": "./models/tiny",
        "./missing": "./configs/missing",
        "deep/er/missing": "configs/deep/er/missing",
        HUB: HUB,
        "../../outside": "{above}/outside",
    },
    "model.critic.path": {"../models/tiny": "./models/tiny", HUB: HUB},
    "inference.python": {"python3": "python3", "../bin/python": "bin/python", "../python": "{here}/python"},
    "bus.credentials": {"key.nk": "configs/key.nk"},
    "algorithm.calls": {"calls.py:advantages": "configs/calls.py:advantages"},
    "run.directory": {"runs": "runs", "/somewhere": "/somewhere"},
}
"""Setting -> what stands in ``configs/x.yaml`` -> what it is from the folder above."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    for name in ("configs/data/rows.jsonl", "workflows/play.py", "models/tiny/config.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return root


def _with(values: dict[str, str]) -> Path:
    """Return a file that gives settings these values, and others what it takes for the whole to be right."""
    data: dict[str, Any] = {"tasks": [{"dataset": {"path": HUB}}], "algorithm": {"name": "ppo"}}
    for name, value in values.items():
        place, (*above, last) = data, name.split(".")
        for part in above:
            place = place[int(part)] if part.isdecimal() else place.setdefault(part, {})
        place[last] = [value] if last == "calls" else value
    path = Path("configs/x.yaml")
    path.write_text(yaml.safe_dump(data))
    return path


def _value(settings: Settings, name: str) -> str:
    value: Any = settings
    for part in name.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return str(value[0] if isinstance(value, tuple) else value)


def test_a_path_in_a_file_is_relative_to_its_folder_and_means_the_same_file_from_everywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "config.yaml"
    for cases in itertools.zip_longest(*[[(name, *case) for case in cases.items()] for name, cases in PLACES.items()]):
        told = {name: (text, seen) for name, text, seen in filter(None, cases)}
        settings = load_settings(_with({name: text for name, (text, _) in told.items()}))
        recorded.write_text(dump_settings(settings))
        again = load_settings(recorded, use_environment=False)
        monkeypatch.chdir(tmp_path)
        elsewhere = load_settings(recorded, use_environment=False)

        assert again == settings
        for name, (text, seen) in told.items():
            wanted = seen.format(home=tmp_path / "home", here=project, above=tmp_path)
            assert _value(settings, name) == wanted, name
            file = Path(_value(elsewhere, name).partition(":")[0])
            is_path = text not in (HUB, "openai/gsm8k", "python3")
            assert file.absolute() == project / wanted.partition(":")[0] if is_path else str(file) == wanted
        monkeypatch.chdir(project)


def test_a_path_of_a_command_is_relative_to_where_it_is_given(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_ASYNC_MODEL__PATH", "models/tiny")
    config = _with({"tasks.0.workflow": "../workflows/play.py"})

    settings = load_settings(
        config, ["--tasks.0.dataset.path", "configs/data/rows.jsonl", "--bus.ca=ca.pem", "--bus.url=nats://h:1"]
    )

    assert settings.model.path == "./models/tiny"
    assert settings.tasks[0].dataset.path == "configs/data/rows.jsonl"
    assert settings.bus.ca == Path("ca.pem")
    assert override_settings(settings, ["--model.path", f"{project}/models/tiny"]) == settings


def test_a_path_that_is_there_from_the_working_directory_alone_is_refused_with_the_right_one(project: Path) -> None:
    for name, text, right in (
        ("tasks.0.workflow", "workflows/play.py", "../workflows/play.py"),
        ("tasks.0.dataset.path", "configs/data/rows.jsonl", "data/rows.jsonl"),
        ("model.path", "models/tiny", "../models/tiny"),
    ):
        config = _with({name: text})
        looked = project / "configs" / text

        with pytest.raises(UserError, match=rf"^{name}: got {text}, need .* no {looked}; write {right} in configs/x"):
            load_settings(config)
        assert _value(load_settings(config, [f"--{name}", right.replace("../", "./")]), name)


def test_what_an_earlier_run_recorded_is_relative_to_where_it_was_started(project: Path) -> None:
    recorded = project / "configs" / "config.yaml"
    recorded.write_text(
        "model: {path: models/tiny}\ntasks: [{workflow: workflows/play.py, dataset: {path: r.jsonl}}]\n"
    )

    settings = load_settings(recorded, use_environment=False)

    assert (settings.model.path, settings.tasks[0].workflow) == ("./models/tiny", "workflows/play.py")
    before, now = (
        with_real_paths(one, Settings)
        for one in (yaml.safe_load(recorded.read_text()), settings.model_dump(mode="json"))
    )
    assert before["model"]["path"] == now["model"]["path"] == str(project / "models" / "tiny")
    assert before["tasks"][0]["workflow"] == now["tasks"][0]["workflow"]


def test_links_on_the_way_to_a_file_are_followed_and_its_own_name_stays(project: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(project / "configs")
    (project / "models" / "alias").symlink_to("tiny")
    text = "model: {path: ../models/alias}\n"
    (project / "configs" / "x.yaml").write_text(text)

    assert load_settings(tmp_path / "link" / "x.yaml").model.path == "./models/alias"


def test_one_function_is_told_however_its_file_is_written(project: Path) -> None:
    for same in ("./workflows/play.py", f"{project}/workflows/play.py:play", "configs/../workflows/play.py"):
        assert is_same_function("workflows/play.py", same)
    assert not is_same_function("workflows/play.py", "workflows/play.py:other")


def test_every_setting_that_holds_a_path_says_of_which_kind_it_is() -> None:
    for kind in (Settings, SftSettings, RewardModelSettings):
        for parts, _ in leaves(kind):
            annotation = without_none(annotation_at(kind, parts))
            if get_origin(annotation) is tuple:
                annotation = get_args(annotation)[0]
            holds_path = Path in (annotation, *get_args(annotation)) or parts[-1] in (
                "path",
                "python",
                "workflow",
                "environment",
                "calls",
            )
            assert get_origin(annotation) is not UnionType
            assert (path_kind(annotation) is not None) == holds_path, parts
