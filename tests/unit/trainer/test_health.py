"""An alarm is raised by the step that shows its cause, stays while it is there, and clears when it is gone."""

import math
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.health import HealthSettings
from areal_async.trainer.health import alarms, equal_rewards, logprob_gap, skipped_updates
from areal_async.trainer.output.archive import MetricsFile

SETTINGS = HealthSettings(equal_rewards_steps=3, logprob_gap=0.1)


def line(step: int = 1, **changes: Any) -> dict[str, Any]:
    """A step in good health."""
    return {
        "step": step, "weights_version": f"1-{step}", "reward_mean": 0.5, "reward_std": 0.5, "num_groups": 4,
        "num_trajectories": 16, "groups_all_equal": 1, "logprob_gap_mean": 0.01, "num_current_tokens": 100,
        "num_updates": 1, "num_skipped": 0, "num_skipped_loss": 0, **changes,
    }  # fmt: skip


FLAT = {"groups_all_equal": 4}


def test_a_healthy_run_raises_nothing() -> None:
    assert alarms([line(step) for step in range(1, 9)], SETTINGS) == []
    assert alarms([], SETTINGS) == []


@pytest.mark.parametrize(
    ("flat", "raised"),
    [("fff", True), ("ff", False), ("ffo", False), ("foff", False), ("offf", True), ("fffff", True)],
)
def test_equal_rewards_are_told_after_as_many_steps_in_a_row(flat: str, raised: bool) -> None:
    lines = [line(step, staleness_max=2, **(FLAT if one == "f" else {})) for step, one in enumerate(flat, start=1)]

    alarm = equal_rewards(lines, SETTINGS)

    assert (alarm is not None) == raised
    if alarm is not None:
        assert alarm.value == flat.count("f")
        assert alarm.first_version == flat.index("fff") - 2  # sampled two versions before the one it begins with
        assert alarm.sentence.startswith(f"all rewards are equal for {flat.count('f')} steps (mean 0.5)")


def test_groups_that_differ_from_each_other_teach_nothing_where_siblings_are_compared() -> None:
    assert equal_rewards([line(**FLAT, reward_std=0.5)] * 3, SETTINGS)


def test_groups_of_one_teach_a_critic_while_their_rewards_differ() -> None:
    alone = {"num_trajectories": 4, **FLAT}

    assert equal_rewards([line(**alone)] * 3, SETTINGS) is None
    assert equal_rewards([line(**alone, reward_std=0.0)] * 3, SETTINGS)


@pytest.mark.parametrize(("gap", "raised"), [(0.1, False), (0.11, True), (math.nan, True)])
def test_a_gap_over_the_bound_is_told(gap: float, raised: bool) -> None:
    alarm = logprob_gap([line(), line(2, logprob_gap_mean=gap)], SETTINGS)

    assert (alarm is not None) == raised
    if alarm is not None:
        assert (alarm.value, alarm.bound) == (pytest.approx(gap, nan_ok=True), 0.1)
        assert alarm.first_version == 1


def test_a_step_without_current_tokens_says_nothing_of_the_gap() -> None:
    blind = line(3, num_current_tokens=0, logprob_gap_mean=0.0)

    assert logprob_gap([line(2, logprob_gap_mean=0.5), blind], SETTINGS)
    assert logprob_gap([line(2), blind], SETTINGS) is None
    assert logprob_gap([blind], SETTINGS) is None


def test_a_step_that_made_no_update_is_told() -> None:
    policy = skipped_updates([line(7, num_updates=0, num_skipped=2, value_num_updates=1)])
    critic = skipped_updates([line(7, value_num_updates=0, value_num_skipped=1)])

    assert policy is not None
    assert policy.first_version == 6
    assert policy.sentence == "every update of step 7 was skipped (2): loss or gradient not finite"
    assert critic is not None
    assert critic.sentence.startswith("every critic's update of step 7 was skipped (1)")
    assert skipped_updates([line(num_updates=1, num_skipped=1, value_num_updates=1)]) is None
    assert skipped_updates([line(num_updates=0)]) is None  # nothing was there to train


def test_an_alarm_can_be_switched_off() -> None:
    sick = [line(step, **FLAT, logprob_gap_mean=9.0) for step in range(1, 9)]

    assert len(alarms(sick, HealthSettings())) == 2
    assert alarms(sick, HealthSettings(equal_rewards_steps=None, logprob_gap=None)) == []


def test_the_steps_before_a_restart_are_read_from_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.append(line(step))

    assert [one["step"] for one in file.newest(2)] == [4, 5]
    assert MetricsFile(tmp_path / "none.jsonl").newest(2) == []
