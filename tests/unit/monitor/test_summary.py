"""The end of a run says what came of it, from its files alone, and draws the curve."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from areal_async.config.settings import DatasetSettings, RunSettings, Settings, TaskSettings
from areal_async.monitor.report.charts import COLOURS
from areal_async.monitor.report.summary import last_per_step, summarise


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(run=RunSettings(name="g", directory=tmp_path))
    settings.run_directory.mkdir()
    return settings


def _write(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_summary_compares_the_ends_and_draws_the_curve(settings: Settings) -> None:
    directory = settings.run_directory
    _write(
        directory / "metrics.jsonl",
        [
            {
                "step": step, "reward_mean": step / 10, "num_tokens": 1000, "num_trajectories": 128,
                "dropped_stale": 1, "failed": 0, "staleness_mean": 1.0, "staleness_max": 2,
                "time_step_s": 2.0, "time_wait_data_s": 0.5, "time_train_s": 1.0, "time_weights_s": 0.1,
            }
            for step in range(1, 11)
        ],
    )  # fmt: skip
    _write(
        directory / "eval.jsonl",
        [{"step": step, "accuracy": accuracy, "num_scored": 256} for step, accuracy in ((0, 0.25), (10, 0.5))],
    )
    (directory / "model").mkdir()

    lines = summarise(settings)

    assert lines[:4] == [
        "reward: 0.300 over the first 5 steps, 0.800 over the last 5",
        "greedy accuracy: 0.250 at step 0, 0.500 at step 10, over 256 held-out rows",
        "time: 20 s in 10 steps: waiting for data 25%, training 50%, weights 5%",
        "trained: 10,000 tokens of 1,280 trajectories; dropped as stale 10, failed 0",
    ]
    assert f"{directory / 'model'}: the trained model, a Hugging Face folder" in lines
    picture = np.asarray(Image.open(directory / "reward.png").convert("RGB"))
    drawn = {
        name: int((picture == ImageColor.getrgb(COLOURS[name])).all(axis=-1).sum()) for name in ("c1", "c2", "soft")
    }
    assert picture.shape[1] > 2 * picture.shape[0], "two charts beside each other"
    assert min(drawn.values()) > 300, f"two lines, and what the axes are: {drawn}"
    left, right = np.split((picture == ImageColor.getrgb(COLOURS["c1"])).all(axis=-1), 2, axis=1)
    assert len(left.any(axis=1).nonzero()[0]) > 200, "the reward has gone up"
    assert right.any()


def test_a_mean_of_rewards_that_are_not_0_or_1_is_called_no_accuracy(settings: Settings) -> None:
    directory = settings.run_directory
    _write(directory / "metrics.jsonl", [{"step": 1, "reward_mean": 0.5}])
    _write(directory / "eval.jsonl", [{"step": 0, "accuracy": -0.25, "num_scored": 8, "is_graded": True}])

    assert "greedy mean reward: -0.250 at step 0" in summarise(settings)


def test_summary_compares_each_task_with_itself(settings: Settings) -> None:
    rows = DatasetSettings(path="x")
    both = settings.model_copy(
        update={"tasks": (TaskSettings(workflow="a.py", dataset=rows), TaskSettings(workflow="b.py", dataset=rows))}
    )
    directory = settings.run_directory
    _write(directory / "metrics.jsonl", [{"step": 1, "reward_mean": 0.5}])
    _write(
        directory / "eval.jsonl",
        [
            {"step": step, "workflow": workflow, "accuracy": accuracy, "num_scored": 8}
            for workflow, step, accuracy in (("a", 0, 0.25), ("b", 0, 0.5), ("a", 9, 0.75), ("b", 9, 1.0))
        ],
    )

    lines = summarise(both)

    assert lines[1:3] == [
        "greedy accuracy of a: 0.250 at step 0, 0.750 at step 9, over 8 held-out rows",
        "greedy accuracy of b: 0.500 at step 0, 1.000 at step 9, over 8 held-out rows",
    ]


def test_run_that_trained_nothing_only_says_where_things_are(settings: Settings) -> None:
    (settings.run_directory / "logs").mkdir()

    assert summarise(settings) == [f"{settings.run_directory / 'logs'}: one file per process"]


def test_repeated_evaluation_counts_once() -> None:
    lines = [{"step": 20, "accuracy": 0.4}, {"step": 0, "accuracy": 0.3}, {"step": 20, "accuracy": 0.5}]

    assert [line["accuracy"] for line in last_per_step(lines)] == [0.3, 0.5]
