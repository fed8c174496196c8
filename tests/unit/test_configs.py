"""Every run that ships can be started: its workflow is there, its own data has the columns, the GPUs suffice."""

import json
from pathlib import Path

import pytest
import yaml

from areal_async.cli.run import check
from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.launch.plan import plan_groups
from areal_async.launch.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "tasks" in yaml.safe_load(path.read_text()))
WORKFLOWS = sorted(
    path.stem for path in (ROOT / "workflows").glob("*.py") if (ROOT / f"configs/{path.stem}_cpu.yaml").exists()
)
NUM_GPUS = 8


def settings_of(path: Path) -> Settings:
    return load_settings(path)


def with_what_other_verbs_make(settings: Settings) -> Settings:
    """Return the settings as if another command had made the models that they take from ``runs/``."""
    policies = {
        name: policy.model_copy(update={"path": "configs/models/tiny"})
        if (policy.path or "").startswith("runs/")
        else policy
        for name, policy in settings.policies.items()
    }
    return settings.model_copy(update={"policies": policies})


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_run_passes_the_checks_that_need_no_gpu(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("areal_async.cli.checks.fetch", lambda *_, **__: None)  # not every machine reaches a hub
    settings = settings_of(path)
    if settings.inference.python is not None:  # what an environment of its own holds is not this test's
        settings = settings.model_copy(update={"inference": settings.inference.model_copy(update={"python": None})})

    check(with_what_other_verbs_make(settings))
    plan_groups(settings, RunDirectory(tmp_path), gpus=tuple(map(str, range(NUM_GPUS))))


def test_each_workflow_has_settings_for_both_kinds_of_machine() -> None:
    for name in WORKFLOWS:
        for config in (ROOT / f"configs/{name}.yaml", ROOT / f"configs/{name}_cpu.yaml"):
            assert [task.workflow for task in settings_of(config).tasks] == [f"workflows/{name}.py"]


def test_train_and_test_files_of_ours_have_the_same_columns() -> None:
    for path in RUNS:
        settings = settings_of(path)
        datasets = [*(task.dataset for task in settings.tasks), settings.eval.dataset]
        columns = set()
        for dataset in datasets:
            if dataset is not None and dataset.path.endswith(".jsonl"):
                with (ROOT / dataset.path).open(encoding="utf-8") as lines:
                    columns.add(tuple(json.loads(lines.readline())))
        assert len(columns) <= 1, path.name
