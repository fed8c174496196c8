"""An environment with steps, in plain Python: nim against a player that makes no mistake, and credit for each reply.

``reset`` begins a game and ``step`` takes one move of the model: both say what the model is told next, as environments
do. Another game, a shop or a simulator takes the place of ``Nim``; what is below it stays as it is.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from areal_async import Message, Policy, Prompt, Rewards
from rewards.math_answer import last_number, marked_answer

MOST = 3
"""Stones that a player may take at once, and at least one."""
LARGEST = 11
"""Stones that a game begins with, at most."""
FORBIDDEN = -2.0
"""What a move is worth that the rules forbid: less than a lost game, which would be as good otherwise."""


class Step(NamedTuple):
    """What came of a move."""

    told: str
    """What the model is told before its next one."""
    reward: float
    is_over: bool


class Nim:
    """One game: who takes the last stone wins."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin a game of ``row["stones"]``; where the other has lost already he takes ``row["rival_takes"]``."""
        self._stones, self._rival_takes = int(row["stones"]), int(row["rival_takes"])
        return question(self._stones)

    def step(self, text: str) -> Step:
        """Take the model's move, and the other's."""
        taken = read_move(text, self._stones)
        if taken is None:
            return Step("", FORBIDDEN, is_over=True)
        self._stones -= taken
        if not self._stones:
            return Step("", 1.0, is_over=True)
        self._stones -= best_move(self._stones) or min(self._rival_takes, self._stones)
        if not self._stones:
            return Step("", -1.0, is_over=True)
        return Step(question(self._stones), 0.0, is_over=False)


async def nim(prompt: Prompt, policy: Policy) -> Rewards:
    """Play one game; each reply is worth what was earned from it on."""
    environment = Nim()
    step = Step(environment.reset(prompt.row), 0.0, is_over=False)
    messages: list[Message] = []
    earned: dict[str, float] = {}
    while not step.is_over:
        messages.append({"role": "user", "content": step.told})
        reply = await policy.chat(messages)
        messages.append(reply.message)
        step = environment.step(reply.text)
        earned[reply.id] = step.reward
    policy.info["has_won"] = step.reward > 0
    policy.info["keeps_rules"] = step.reward > FORBIDDEN
    return dict(zip(reversed(earned), accumulate(reversed(earned.values())), strict=True))


def rows() -> Iterator[dict[str, int]]:
    """Yield every game that can be won."""
    for stones in range(1, LARGEST + 1):
        if best_move(stones):
            yield from ({"stones": stones, "rival_takes": taken} for taken in range(1, MOST + 1))


def question(stones: int) -> str:
    """Return what a player is told before a move."""
    left = "1 stone is" if stones == 1 else f"{stones} stones are"
    return f"{left} left. Take 1, 2 or 3. How many do you take?"


def read_move(text: str, stones: int) -> int | None:
    """Return the number of stones that a player takes; None for a move that the rules forbid."""
    marked = marked_answer(text)
    number = last_number(text if marked is None else marked)
    return next((taken for taken in range(1, min(MOST, stones) + 1) if taken == number), None)


def best_move(stones: int) -> int:
    """Return the number to take that leaves the other a lost game; 0 where there is none."""
    return stones % (MOST + 1)
