"""The small data sets are what their tools write, can be won, and share nothing between train and test."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewards.code_tests import passes_all
from rewards.countdown import target_reached
from tools import make_coding, make_countdown, make_nim

SHIPPED = make_countdown.DATA


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        (make_countdown, ("countdown_train", "countdown_test")),
        (make_coding, ("coding_train", "coding_test")),
        (make_nim, ("nim_train", "nim_test")),
    ],
)
def test_what_ships_is_what_the_tool_writes(tool: Any, names: tuple[str, str], tmp_path: Path) -> None:
    tool.write_data(tmp_path, seed=1)

    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (SHIPPED / f"{name}.jsonl").read_bytes()


def test_no_game_of_nim_is_in_both_files() -> None:
    train, test = ({row["stones"] for row in rows(name)} for name in ("nim_train", "nim_test"))

    assert not train & test
    assert max(train) >= max(test), "the model is asked for what lies between the games it has seen"


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


SOLUTIONS = {
    "the largest of the numbers, minus": "max({}) - {}",
    "every number multiplied by": "[value * {1} for value in {0}]",
}


@pytest.mark.anyio
@pytest.mark.parametrize("wording", SOLUTIONS)
async def test_a_task_is_solved_by_who_reads_it(wording: str) -> None:
    found = [row for row in rows("coding_train") if wording in row["task"]]
    for row in (
        min(found, key=lambda one: "function" in one["task"]),
        max(found, key=lambda one: "function" in one["task"]),
    ):
        k = int(re.findall(r"\d+", row["task"])[-1])
        for number, score in ((k, 1.0), (k + 1, 0.0)):
            solution = SOLUTIONS[wording].format("given", number)
            name = re.search(r"function (\w+)", row["task"])
            if name is not None:
                program = f"def {name[1]}(given):\n    return {solution}"
            else:
                program = (
                    f"given = list(map(int, input().split()))\nfound = {solution}\n"
                    "print(*(found if isinstance(found, list) else [found]), sep='\\n')"
                )

            assert await passes_all(f"```python\n{program}\n```", json.loads(row["tests"])) == score, row["task"]
