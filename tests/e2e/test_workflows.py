"""Every workflow that ships runs to its end on a CPU, on its own rows and with the tiny models.

Those of one model share a run with the settings of the first, which has most of the prompts and raises its reward.
``gsm8k`` and ``countdown`` are in ``test_run.py``, ``judge`` and ``self_play`` in ``test_named_policies.py``,
``preference`` in ``test_preference.py``, ``multi_turn_math`` in ``test_lora.py``, ``calculator`` in ``test_mixed.py``,
``nim`` in ``test_wheel.py``.
"""

import json
from pathlib import Path

import pytest

from areal_async.config.sources import load_settings
from tests.e2e.test_run import REPOSITORY, Run

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

NUM_STEPS = 12
ROWS_BESIDE = "train[:160]"
"""Of each workflow but the first, which has a thousand or two: it gets so many times the prompts."""
WITH_TOOLS = ("python_tool", "search", "clevr_zoom")


def _tasks(*names: str) -> str:
    """Return the setting ``tasks``: each workflow's as it ships, with what else its own configuration has of it."""
    tasks = []
    for name in names:
        own = load_settings(REPOSITORY / f"configs/{name}_cpu.yaml")
        (task,) = own.model_dump(mode="json", exclude_none=True)["tasks"]
        if name != names[0]:
            task["dataset"]["split"] = ROWS_BESIDE
        task["eval"] = own.eval.model_dump(mode="json", exclude_none=True, include={"dataset"})
        task["episode_deadline_s"] = own.rollout.episode_deadline_s
        task["sampling"] = {"max_new_tokens": own.rollout.sampling.max_new_tokens}
        tasks.append(task)
    return json.dumps(tasks)


@pytest.mark.parametrize(
    ("names", "max_staleness"),
    [(("python_tool", "search", "coding", "openai_agent"), 2), (("clevr_count", "clevr_zoom"), 0)],
    ids=["text", "images"],
)
def test_workflows_that_ship_run_to_their_end_and_one_raises_its_reward_in_a_dozen_steps(
    tmp_path: Path, names: tuple[str, ...], max_staleness: int
) -> None:
    """Of some 100 answers a step: in full runs it goes from 0.3 to 0.6 meanwhile, with a standard error of 0.02.

    Images on-policy, so that every token says whether the trainer sees what the servers saw: row 34 of the faults has
    them asynchronously.
    """
    first = names[0]
    run = Run(
        tmp_path,
        "learning",
        run__steps=NUM_STEPS,
        rollout__batch_groups=16,
        eval__limit=4,
        rollout__max_staleness=max_staleness,
    )
    settings = ("--config", f"configs/{first}_cpu.yaml", "--tasks", _tasks(*names), "--eval.dataset", "null")

    ended = run.finish(*settings, workflow=f"workflows/{first}.py")

    assert ended.returncode == 0, ended.stdout
    assert "nothing was learned" not in ended.stdout
    assert [line["step"] for line in run.lines] == list(range(1, NUM_STEPS + 1))
    assert all(line["failed"] == 0 and 0.0 <= line["reward_mean"] <= 1.0 for line in run.lines), run.lines
    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    assert [(one["step"], one["workflow"]) for one in evaluated] == [
        (at, name) for at in (0, NUM_STEPS) for name in names
    ]
    for name in names:
        trained = [row for row in run.trained if row["workflow"] == name]
        assert 0 < sum(row["reward"] for row in trained) < len(trained), f"{name}: it can do it, and not well"
        calling = {row["step"] for row in trained if json.loads(row["info"]).get("rollout/num_tool_calls")}
        assert name not in WITH_TOOLS or calling, name
        assert name != "python_tool" or len(calling) == NUM_STEPS
    assert all(line["logprob_gap_mean"] < 1e-4 for line in run.lines), run.lines
    assert max_staleness or all(line["num_current_tokens"] == line["num_tokens"] for line in run.lines)
    rewards = [line[f"reward/{first}"] for line in run.lines]
    assert sum(rewards[-4:]) > sum(rewards[:4]), rewards
