"""A game of numbers: reach a target from a few numbers, each used at most once; scored by working the answer out."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_async import Policy, Prompt
from rewards.countdown import target_reached

QUESTION = (
    "Reach {target} with the numbers {numbers}, each used at most once, by + - * / and brackets. Think first, then "
    "write the expression alone on the last line, such as (8-2)*4."
)


async def countdown(prompt: Prompt, policy: Policy) -> float:
    """Play one game; 1.0 when the last line of the answer comes to the target by the numbers given."""
    question, numbers, target = game(prompt.row)
    reply = await policy.chat([{"role": "user", "content": question}])
    return target_reached(reply.text, numbers, target)


def game(row: Mapping[str, Any]) -> tuple[str, Sequence[int], int]:
    """Read a row: question, numbers and target, or nums and target, as the public data set has them."""
    numbers = row["numbers"] if "numbers" in row else row["nums"]
    question = row.get("question") or QUESTION.format(target=row["target"], numbers=", ".join(map(str, numbers)))
    return question, numbers, row["target"]
