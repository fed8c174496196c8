"""A reward model is trained on two ranks, and a run learns from nothing but its scores."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.test_run import DEADLINE_S, REPOSITORY, Run, assert_accounts

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_runs]

END = "<|im_end|>"


def train_reward_model(directory: Path) -> Path:
    """Train for a few steps and return the folder of the model."""
    overrides = {
        "run.directory": directory, "run.name": "taste", "run.steps": 12, "trainer.batch_pairs": 16,
        "trainer.warmup_steps": 2, "trainer.num_ranks": 2, "eval.limit": 64,
    }  # fmt: skip
    words = [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "areal_async", "reward-model", "--config", "configs/reward_model_tiny.yaml", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pairs right" in done.stdout
    lines = [json.loads(line) for line in (directory / "taste" / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_pairs"] for line in lines[:12]] == [16] * 12, "over both ranks"
    assert lines[-1]["held_out_accuracy"] > 0.6
    return directory / "taste" / "model"


def plain_score(model: Any, tokenizer: Any, row: dict[str, Any]) -> float:
    """Return what transformers alone says of a trained trajectory, written out and closed."""
    (token_ids,) = row["token_ids"]
    text = tokenizer.decode(token_ids).removesuffix(END) + f"{END}\n"
    with torch.no_grad():
        return model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item()


def test_rewards_of_a_run_are_the_scores_of_the_model_that_was_trained_for_it(tmp_path: Path) -> None:
    folder = train_reward_model(tmp_path)
    run = Run(tmp_path, "preference", run__steps=2, eval__limit=4, policies__reward_model__path=folder)

    ended = run.finish("--config", "configs/preference_cpu.yaml", workflow="workflows/preference.py")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    assert all(line["failed"] == 0 for line in run.lines), run.lines
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [plain_score(model, tokenizer, row) for row in run.trained]
    assert [row["reward"] for row in run.trained] == pytest.approx(expected, abs=1e-4)
    assert len({round(reward, 2) for reward in expected}) > 8, "else anything passes"
