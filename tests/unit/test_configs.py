"""Every run that ships can be started: its workflow is there, its own data has the columns, the GPUs suffice."""

import json
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from areal_async.cli.run import check
from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.doctor.preflight.machine import Gpu
from areal_async.doctor.preflight.memory import ModelSize
from areal_async.doctor.preflight.sharing import share_of
from areal_async.errors import UserError
from areal_async.launch.plan import plan_groups
from areal_async.launch.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "tasks" in yaml.safe_load(path.read_text()))
WORKFLOWS = sorted(
    path.stem for path in (ROOT / "workflows").glob("*.py") if (ROOT / f"configs/{path.stem}_cpu.yaml").exists()
)
NUM_GPUS = 8
QWEN_1B5 = ModelSize(
    num_parameters=1_543_714_304,
    num_layers=28,
    hidden=1536,
    kv_width=256,
    intermediate=8960,
    is_tied=True,
    vocab=151_936,
    context=32_768,
)
QWEN_0B5 = ModelSize(
    num_parameters=494_032_768,
    num_layers=24,
    hidden=896,
    kv_width=128,
    intermediate=4864,
    is_tied=True,
    vocab=151_936,
    context=32_768,
)
"""Qwen2.5-0.5B-Instruct, as above."""


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
    # Not every machine reaches a hub.
    monkeypatch.setattr("areal_async.cli.starting.checks.fetch", lambda *_, **__: None)
    settings = settings_of(path)
    if settings.inference.python is not None:  # what an environment of its own holds is not this test's
        settings = settings.model_copy(update={"inference": settings.inference.model_copy(update={"python": None})})

    check(with_what_other_verbs_make(settings))
    plan_groups(settings, RunDirectory(tmp_path), gpus=tuple(map(str, range(NUM_GPUS))))


def _flags_in(config: Path, *, after: str) -> list[str]:
    """Return the settings in the command that a file's own comment names."""
    comment = config.read_text(encoding="utf-8").partition(after)[2]
    command = shlex.split(next(line for line in comment.splitlines() if "areal_async run" in line).lstrip("# "))
    return command[command.index(f"configs/{config.name}") + 1 :]


@pytest.mark.parametrize(
    ("after", "size", "card_bytes"),
    [("80 GB", QWEN_1B5, 80 * 10**9), ("24 GB", QWEN_0B5, 24 * 10**9)],
    ids=["80 GB", "24 GB"],
)
def test_one_gpu_holds_both_sides(
    after: str, size: ModelSize, card_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the estimate; more tokens in a row do not fit any more."""
    monkeypatch.chdir(ROOT)
    config = ROOT / "configs/gsm8k_1gpu.yaml"
    settings = load_settings(config, _flags_in(config, after=after))

    groups = plan_groups(settings, RunDirectory(tmp_path), gpus=("0",))
    share, _ = share_of(settings, (Gpu("one", card_bytes, card_bytes),), {"actor": size})

    seen = {spec.environment["CUDA_VISIBLE_DEVICES"] for group in groups[:2] for spec in group.make_specs()}
    assert seen == {"0"}
    # Half of all running answers may be as long as they can.
    assert share.cache_tokens > settings.inference.max_running_requests // 2 * 1024
    larger = settings.trainer.model_copy(update={"token_budget": 40 * settings.trainer.token_budget})
    with pytest.raises(UserError, match="need 90% of it at most"):
        share_of(
            settings.model_copy(update={"trainer": larger}), (Gpu("one", card_bytes, card_bytes),), {"actor": size}
        )


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
            if dataset is not None and dataset.path is not None and dataset.path.endswith(".jsonl"):
                with (ROOT / dataset.path).open(encoding="utf-8") as lines:
                    columns.add(tuple(json.loads(lines.readline())))
            if dataset is not None and dataset.path is not None and dataset.path.endswith(".parquet"):
                columns.add(tuple(pq.read_schema(ROOT / dataset.path).names))
        assert len(columns) <= 1, path.name
