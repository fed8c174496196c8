"""Agents as they come from their index are trained, two steps each, on the tokens that the engine said to them.

Each row names a program (``tests/unit/rollout/endpoint/agents``) of another framework, which asks in all its modes.
That a token is the engine's is proved by its logprob: one that was lost, doubled or made up has not the one that the
weights of its version give it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_run import Run
from tests.sglang.scoring import TOLERANCE
from tests.unit.inference.embedded_engine import reference_logprobs
from tests.unit.rollout.endpoint.terse import build_terse
from tests.unit.rollout.endpoint.test_frameworks import AGENTS_PYTHON, MORE_PYTHON, QUIET, find_program

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

PROGRAMS = ["openai", "anthropic", "openai_agents", "pydantic_ai", "langgraph", "instructor", "smolagents"]
MORE_PROGRAMS = ["litellm", "dspy", "inspect_ai"]


def train(tmp_path: Path, programs: list[str], python: str) -> None:
    """Train two steps, each on every program twice, and check what was trained."""
    model = build_terse(tmp_path / "model", sharpness=30.0)
    environment = {**QUIET, "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    rows = [{"program": f"{name}_modes", "python": python, "environment": environment} for name in programs]
    dataset = tmp_path / "programs.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = json.dumps([{"workflow": "tests/e2e/black_box.py", "dataset": {"path": str(dataset)}}])
    run = Run(tmp_path, "agents", run__steps=2, tasks=tasks, model__path=model, rollout__max_staleness=0,
              rollout__group_size=2, rollout__min_group_size=2, rollout__episode_deadline_s=300,
              rollout__sampling__max_new_tokens=200, trainer__token_budget=16384,
              run__watchdog_s=600, eval__dataset="null")  # fmt: skip

    ended = run.finish("--rollout.batch_groups", str(len(programs)), workflow="tests/e2e/black_box.py")

    assert ended.returncode == 0, ended.stdout
    assert [(line["step"], line["num_trajectories"]) for line in run.lines] == [
        (1, 2 * len(programs)),
        (2, 2 * len(programs)),
    ]
    for step, line in enumerate(run.lines, start=1):
        rows_of_step = [row for row in run.trained if row["step"] == step]
        places = sorted(int(row["group_id"].split("-")[1]) for row in rows_of_step)
        assert places == sorted(2 * list(range(len(programs)))), "each program is in each step"
        assert all(json.loads(row["info"])["modes"] > 0 for row in rows_of_step)
        assert line["logprob_gap_mean"] < 1e-3, "the trainer gives what nothing has steered the engine's logprobs"
        assert line["steered_tokens"] > 0
        if step == 1:
            for row in rows_of_step:
                assert_said_by(model, row)


def assert_said_by(model: Path, row: Mapping[str, Any]) -> None:
    """Each trained token has the logprob that the model gives it, and no lower one where a grammar left others out."""
    for number, token_ids in enumerate(row["token_ids"]):
        mask = np.array(row["loss_mask"][number])[1:]
        gap = np.array(row["logprobs"][number])[1:] - reference_logprobs(model, token_ids[:1], token_ids[1:])
        steered = np.array(row["steered"][number])[1:] if row["steered"] else np.zeros_like(mask)
        assert mask.any()
        assert np.abs(gap[mask & ~steered]).max(initial=0.0) < TOLERANCE
        assert gap[mask & steered].min(initial=0.0) > -TOLERANCE


def test_agents_of_many_frameworks_are_trained_in_one_run(tmp_path: Path) -> None:
    train(tmp_path, PROGRAMS, find_program(AGENTS_PYTHON, "NEED_AGENTS", "make agents"))


@pytest.mark.nightly
def test_agents_of_frameworks_that_are_tried_at_night_are_trained_in_one_run(tmp_path: Path) -> None:
    train(tmp_path, MORE_PROGRAMS, find_program(MORE_PYTHON, "NEED_MORE_AGENTS", "make agents-more"))
