"""A run whose policy is shown images: they are stored once for each group, and the trainer sees what the server saw."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_doctor import diagnose
from tests.e2e.test_run import Run, assert_accounts
from tools.make_tiny_vision import write_folder

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

WORKFLOW = """
from PIL import Image


async def shapes(prompt, policy):
    number = prompt.index % 5
    picture = Image.new("RGB", (64, 64), (50 * number, 200, 20))
    shown = [{"type": "image", "image": picture}] if number else []
    reply = await policy.chat([{"role": "user", "content": [*shown, {"type": "text", "text": "How many?"}]}])
    return float(sum(reply.token_ids) % 2)
"""


ADAPTERS = {"trainer__lora__rank": 4, "trainer__vision": "lora", "trainer__lr": 1e-2}
"""Every step's answers are of the adapters that the step before has announced, and has changed so that it shows."""


@pytest.mark.parametrize("given", [pytest.param({}, marks=pytest.mark.nightly), ADAPTERS])
def test_the_trainer_sees_what_the_servers_saw(given: dict[str, Any], tmp_path: Path) -> None:
    """A fifth of the prompts are text alone. On-policy, so that every token counts for the gap.

    Of whole weights every day: ``clevr_count`` in ``test_workflows.py``.
    """
    workflow = tmp_path / "shapes.py"
    workflow.write_text(WORKFLOW)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": n}) + "\n" for n in range(32)))
    write_folder(tmp_path / "model", family="qwen3_vl", seed=1)
    settings = {"run__steps": 4, "model__path": tmp_path / "model", "rollout__sampling__max_new_tokens": 8, **given}
    run = Run(tmp_path, "seen", rollout__max_staleness=0, **settings)

    ended = run.finish("--tasks.0.dataset.path", str(tmp_path / "rows.jsonl"), workflow=str(workflow))

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=4, max_staleness=0)
    assert all(line["failed"] == 0 for line in run.lines), run.lines
    assert all(line["num_current_tokens"] == line["num_tokens"] for line in run.lines), run.lines
    assert all(line["grad_norm"] > 0 and line["logprob_gap_mean"] < 1e-4 for line in run.lines), run.lines
    diagnose(run.directory, status=0)
