"""The table says which algorithms learned, and its settings are ones that a run takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_async.config.sources import load_settings
from tools.check_learning import Result
from tools.learning_table import CHOICES, WORKFLOWS, laggards, table


def result(name: str, first: float, last: float) -> Result:
    return Result(
        name=name, first=first, last=last, before=0.4, after=0.5, staleness_max=2, num_steps=100, duration_s=90.0
    )


def test_an_algorithm_that_gains_too_little_or_does_not_end_is_named() -> None:
    results = {"ppo": result("ppo", 0.4, 0.61), "dapo": result("dapo", 0.4, 0.59), "gspo": None}

    assert laggards(results) == ["dapo", "gspo"]
    fallen = replace(result("ppo", 0.4, 0.61), after=0.4)
    assert laggards({"coding, seed 1": fallen}, is_held_out_to_rise=True) == ["coding, seed 1"]
    assert laggards({"coding, seed 1": fallen}) == []
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(results).splitlines()[2:]]
    assert rows[0] == ["ppo", "0.400", "0.610", "+0.21", "0.400", "0.500", "100", "90"]
    assert rows[2][:2] == ["gspo", "did not end"]
    assert len(set(map(len, table(results).splitlines()))) == 1


@pytest.mark.parametrize("name", CHOICES)
def test_what_an_algorithm_is_given_is_taken_by_the_configuration(name: str) -> None:
    overrides = ["--algorithm.name", name, *CHOICES[name].settings]

    loaded = load_settings(Path("configs/gsm8k_cpu.yaml"), overrides, use_environment=False)

    assert loaded.algorithm.name == name
    assert loaded != load_settings(Path("configs/gsm8k_cpu.yaml"), use_environment=False) or name == "grpo"


def test_every_workflow_that_ships_is_in_the_table() -> None:
    assert {"gsm8k", "coding", "search", "openai_agent", "self_play"} <= set(WORKFLOWS)
    assert "openai_agent_program" not in WORKFLOWS
