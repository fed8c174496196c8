"""A run that did not learn says so at its end, with the causes that its numbers show; one that did is told nothing."""

from typing import Any

import pytest

from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.monitor.advice import advice

ROWS = DatasetSettings(path="x")
SETTINGS = Settings(tasks=(TaskSettings(workflow="workflows/a.py", dataset=ROWS),))
NUM_STEPS = 12


def steps(**fields: Any) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of a run that learns, but for these fields: values, or functions of the step."""
    learning: dict[str, Any] = {
        "reward_mean": lambda step: step / 20, "reward_std": 0.4, "num_groups": 16, "groups_all_equal": 3,
        "num_trajectories": 128, "failed": 0, "truncated_share": 0.0, "entropy_mean": 0.5,
    }  # fmt: skip
    both = learning | fields
    return [
        {"step": step} | {key: value(step) if callable(value) else value for key, value in both.items()}
        for step in range(1, NUM_STEPS + 1)
    ]


def evaluations(*accuracies: float) -> dict[str, list[dict[str, Any]]]:
    return {"": [{"step": 6 * place, "accuracy": value} for place, value in enumerate(accuracies)]}


NEVER = {"reward_mean": 0.0, "reward_std": 0.0, "groups_all_equal": 16}
TRY = "look at answers and their rewards with `areal-async try workflows/a.py --n 8`"


@pytest.fixture(autouse=True)
def called_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/areal-async", "run"])


HARD = "the task may be too hard for the model as it is"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ["nothing was learned: the reward was 0 in all 12 steps", f"  the reward may refuse right answers: {TRY}",
              HARD]),
        ({"truncated_share": 0.9}, ["the reward was 0", "90% of the answers were cut off: raise "
                                    "rollout.sampling.max_new_tokens, now 1024", TRY, HARD]),
        ({"rollout/num_tool_calls": 0.0, "rollout/num_tool_errors": 0.0},
         ["the reward was 0", "no tool was ever called", TRY, HARD]),
        ({"rollout/num_tool_calls": 2.0, "rollout/num_tool_errors": 1.5},
         ["the reward was 0", "75% of the tool calls ended", TRY, HARD]),
        ({"rollout/num_tool_calls": 2.0, "rollout/num_tool_errors": 0.1}, ["the reward was 0", TRY, HARD]),
        ({"failed": 100}, ["the reward was 0", "1200 attempts failed beside 1536 that were trained", TRY, HARD]),
    ],
)  # fmt: skip
def test_reward_that_was_always_0_is_told_with_what_the_numbers_show(fields: dict[str, Any], told: list[str]) -> None:
    lines = advice(steps(**NEVER, **fields), evaluations(), SETTINGS)

    assert len(lines) == len(told), lines
    assert all(part in line for part, line in zip(told, lines, strict=True)), lines


def test_same_reward_for_every_answer_is_told() -> None:
    lines = advice(steps(reward_mean=1.0, reward_std=0.0, groups_all_equal=16), evaluations(), SETTINGS)

    assert lines[0] == "nothing was learned: every answer had the same reward, 1, in all 12 steps"
    assert TRY in lines[1]


def test_groups_whose_rewards_never_differ_are_told_with_the_temperature_where_that_is_why() -> None:
    flat = {"groups_all_equal": 16}
    for entropy, is_told in ((0.01, True), (0.5, False)):
        lines = advice(steps(**flat, entropy_mean=entropy), evaluations(), SETTINGS)

        assert lines[0] == "nothing was learned: the answers to one row always had equal rewards, in all 12 steps"
        assert any("raise rollout.sampling.temperature, now 1" in line for line in lines) is is_told
        assert any("a larger rollout.group_size, now 8" in line for line in lines)


def test_one_of_several_tasks_that_is_never_rewarded_is_named() -> None:
    both = SETTINGS.model_copy(
        update={"tasks": (*SETTINGS.tasks, TaskSettings(workflow="workflows/b.py", dataset=ROWS))}
    )
    lines = advice(steps(**{"reward/a": 0.3, "reward/b": 0.0}), {}, both)

    assert lines[0] == "nothing was learned of b: its reward was 0 in all 12 steps"
    assert "try workflows/b.py --n 8" in lines[1]
    assert len(lines) == 2


def test_held_out_rows_that_never_moved_are_told() -> None:
    still = advice(steps(), evaluations(0.25, 0.25, 0.25), SETTINGS)

    assert still[0] == "the held-out reward never moved: 0.250 in all 3 evaluations"
    assert len(still) == 2
    assert not advice(steps()[:5], evaluations(0.25, 0.25), SETTINGS), "too early to tell"
    assert not advice(steps(), evaluations(0.25), SETTINGS), "a single one cannot move"
    assert not advice(steps(), evaluations(1.0, 1.0), SETTINGS), "there is no more"


def test_run_that_learned_is_told_nothing() -> None:
    assert not advice(steps(), evaluations(0.2, 0.3), SETTINGS)
    assert not advice(steps(groups_all_equal=lambda step: 16 if step > 1 else 15), {}, SETTINGS), "one step taught"
    assert not advice([], {}, SETTINGS)
