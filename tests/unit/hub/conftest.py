"""A run made by hand, of which everything has something private in it, and a hub to push to."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.config.settings import Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.hub.hub_server import Hub
from tests.unit.trainer.archives import archive_step, line, write_lines
from tests.unit.trainer.models import engine_of, save_model

ROOT = Path(__file__).parents[3]
FLAG_SECRET, OPTION_SECRET, URL_SECRET, KEY_SECRET, VARIABLE_SECRET = (
    f"{name}-{'0123456789' * 3}" for name in ("flag", "option", "url", "SUKEY", 'v"ari/able')
)
SAID = "Write it so:\n\n```python\nx = 1\n```\n"
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no token and no home of whoever runs this."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "home" / "token"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run of three steps and an evaluation, without a checkpoint."""
    licensed = tmp_path / "home" / "ann" / "base"
    save_model(licensed)
    (licensed / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (licensed / name).write_bytes((ROOT / "configs" / "models" / "tiny" / name).read_bytes())
    rows = {"path": str(tmp_path / "home" / "ann" / "rows.jsonl")}
    settings = Settings.model_validate(
        {
            "run": {"name": "made", "directory": str(tmp_path), "steps": NUM_STEPS},
            "model": {"path": str(licensed), "dtype": "float32"},
            "tasks": [{"workflow": f"{tmp_path}/home/ann/answer.py", "dataset": rows}],
            "eval": {"dataset": rows},
            "rollout": {
                "template": {
                    "arguments": {"site": f"https://ann:{URL_SECRET}@host/x", "apiKey": OPTION_SECRET, "said": SAID}
                }
            },
            "inference": {"flags": ["--api-key", FLAG_SECRET, "--tp", "2"]},
        }
    )
    directory = RunDirectory(tmp_path / "made")
    directory.write_settings(settings)
    for step in range(1, NUM_STEPS + 1):
        archive_step(directory.path, step)
    write_lines(
        directory.path,
        *(line(step, reward_mean=step / 10, staleness_mean=0.5, staleness_max=1) for step in range(1, NUM_STEPS + 1)),
    )
    evaluations = [
        {
            "eval_id": f"1-{step}", "step": step, "workflow": "answer", "accuracy": 0.25 * (1 + step), "num_scored": 8,
            "num_failed": 1, "reasons": {f"no answer of {URL_SECRET}": 1}, "low": 0.1, "high": 0.9,
        }
        for step in (0, 3)
    ]  # fmt: skip
    (directory.path / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    changes = [
        {"setting": "trainer.lr", "before": 1e-6, "after": 2e-6, "by": "ann@host", "reason": ""},
        {
            "setting": "rollout.template.arguments.said",
            "before": "a\n\nb",
            "after": "a|b",
            "by": "ann@host",
            "reason": "",
        },
    ]
    (directory.path / "changes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changes))
    (directory.path / "rows.json").write_text(json.dumps({"tasks.0.dataset": {"num_rows": 7, "sha256": "5" * 64}}))
    (directory.path / "code.json").write_text(json.dumps({"answer.py": "6" * 64}))
    (directory.path / "credentials").mkdir()
    (directory.path / "credentials" / "node.nk").write_text(KEY_SECRET)
    return directory.path


@pytest.fixture
def checkpointed(run: Path, ranks: Ranks) -> Path:
    """Return the directory of that run with a checkpoint of its last step."""
    engine = engine_of(run.parent / "home" / "ann" / "base", ranks)
    Engines(actor=engine).save_checkpoint(run / "checkpoints" / "1-3", b"")
    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return a hub that this process' client speaks to."""
    with Hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield hub
