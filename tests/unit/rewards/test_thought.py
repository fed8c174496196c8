"""An answer is what a model says once it has thought: no reward is paid, and none refused, for its thoughts."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rewards.code_tests import program_in
from rewards.countdown import target_reached
from rewards.json_schema import json_matches
from rewards.math_answer import final_number_matches
from rewards.multiple_choice import choice_matches
from rewards.text_match import text_matches, token_f1
from rewards.thought import after_thought

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("so</think>7", "7"),
        ("<think>so</think>\n7", "\n7"),
        ("<think>a</think>b<think>c</think>7", "7"),
        ("\n<think>7", ""),
        ("<think>a</think> <think>7", ""),
        ("<think>7</think>", ""),
        ("x <think> y", "x <think> y"),
        ("7", "7"),
    ],
)
def test_what_stands_behind_the_last_thought_is_said(text: str, said: str) -> None:
    assert after_thought(text) == said
    assert after_thought(said) == said


@pytest.mark.parametrize(
    ("reward", "right", "wrong", "given"),
    [
        (final_number_matches, r"\boxed{18}", r"\boxed{17}", ["18"]),
        (final_number_matches, "The answer is 18.", "#### 17\n", ["18"]),
        (final_number_matches, "So 18", "\nThe answer is 17.\n", ["18"]),
        (final_number_matches, r"\boxed{\sqrt{2}}", r"\boxed{\sqrt{3}}", [r"\sqrt{2}"]),
        (choice_matches, "The answer is C.", "The answer is A. #### A\n", ["C"]),
        (text_matches, "Paris", "#### Rome\n", ["Paris"]),
        (text_matches, "Paris", "Rome", ["Paris"]),
        (token_f1, "Paris", "Rome", ["Paris"]),
        (json_matches, '{"a": 1}', '```json\n{"b": 1}\n```\n', [SCHEMA]),
        (target_reached, "#### 3+4", "#### 3*4\n", [[3, 4], 7]),
    ],
)
async def test_a_reward_is_for_what_is_said_and_not_for_what_is_thought(
    reward: Callable[..., Any], right: str, wrong: str, given: list[Any]
) -> None:
    async def score(text: str) -> float:
        found = reward(text, *given)
        return float(await found if inspect.isawaitable(found) else found)

    assert await score(f"<think>{wrong}</think>{right}") == await score(f"{wrong}</think>\n{right}") == 1.0
    assert await score(f"<think>{right}</think>{wrong}") == await score(f"{right}</think>\n{wrong}") == 0.0
    assert await score(f"<think>\n{right}") == await score(f"<think>\n{right}</think>") == 0.0


def test_a_program_is_what_is_said() -> None:
    assert program_in("<think>```python\nfirst()\n```</think>```python\nsecond()\n```") == "second()\n"
    assert program_in("<think>```python\nfirst()\n```</think>no") == "no"
