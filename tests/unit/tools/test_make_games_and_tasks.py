"""The small data sets are what their tools write, can be won, and share nothing between train and test."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rewards.countdown import target_reached
from tools import make_calculator, make_coding, make_countdown, make_nim
from tools.make_search import DATA as SHIPPED
from workflows.nim import best_move


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        (make_calculator, ("calculator_train", "calculator_test")),
        (make_countdown, ("countdown_train", "countdown_test")),
        (make_coding, ("coding_train", "coding_test")),
        (make_nim, ("nim_train", "nim_test")),
    ],
)
def test_what_ships_is_what_the_tool_writes(tool: Any, names: tuple[str, str], tmp_path: Path) -> None:
    tool.write_data(tmp_path, seed=1)

    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (SHIPPED / f"{name}.jsonl").read_bytes()


def test_games_of_nim_are_trained_against_oneself_and_tested_against_a_player_who_can_be_beaten() -> None:
    assert {row["rival_takes"] for row in rows("nim_train")} == {0}
    for row in rows("nim_test"):
        assert row["rival_takes"] in (1, 2, 3)
        assert bool(best_move(row["stones"])) == (row["first"] == "policy"), row


def test_every_game_can_be_won() -> None:
    for row in rows("countdown_train") + rows("countdown_test"):
        assert any(target_reached(answer, row["numbers"], row["target"]) for answer in answers(row["numbers"])), row


def answers(numbers: list[int]) -> list[str]:
    found = []
    for order in itertools.permutations(numbers):
        for signs in itertools.product("+-*/", repeat=len(order) - 1):
            expression = str(order[0])
            for sign, number in zip(signs, order[1:], strict=True):
                expression = f"({expression}{sign}{number})"
            found.append(expression)
    return found


def test_no_game_and_no_task_is_in_both_splits() -> None:
    games = [
        {(*sorted(row["numbers"]), row["target"]) for row in rows(f"countdown_{split}")} for split in ("train", "test")
    ]
    tasks = [{row["task"] for row in rows(f"coding_{split}")} for split in ("train", "test")]

    assert not games[0] & games[1]
    assert not tasks[0] & tasks[1]


def test_every_task_has_tests_of_one_style() -> None:
    for row in rows("coding_train") + rows("coding_test"):
        tests = json.loads(row["tests"])

        assert len(tests) == make_coding.NUM_TESTS
        assert len({tuple(test) for test in tests}) == 1
        assert ("function" in tests[0]) == row["task"].startswith("Write a function")
