"""Nim as a Gymnasium environment of texts, ``Nim-v0``, against a player who plays at random. The last stone wins.

    python -m areal_async run gym:Nim-v0

A legal move is worth a little, a won game 1.0, and a move that the rules forbid ends it.
"""

from typing import Any

import gymnasium

MOST = 3
"""Stones that a player may take at once, and at least one."""
LEGAL = 0.1
DIGITS = "0123456789"


class Nim(gymnasium.Env[str, str]):  # type: ignore[misc]
    """The seed decides the stones at the start, and what the other player takes."""

    observation_space = gymnasium.spaces.Text(max_length=256)
    action_space = gymnasium.spaces.Text(max_length=4096)

    def __init__(self, most_stones: int = 9) -> None:
        self._most_stones = most_stones
        self._stones = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        self._stones = int(self.np_random.integers(2, self._most_stones + 1))
        return question(self._stones), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take what the text says, and let the other one move."""
        taken = last_digit(action)
        if not 1 <= taken <= min(MOST, self._stones):
            return "That is no move.", 0.0, True, False, {}
        self._stones -= taken
        if not self._stones:
            return "You win.", 1.0, True, False, {}
        self._stones -= int(self.np_random.integers(1, min(MOST, self._stones) + 1))
        if not self._stones:
            return "You lose.", LEGAL, True, False, {}
        return question(self._stones), LEGAL, False, False, {}


def question(stones: int) -> str:
    """Return what a player is told before a move."""
    left = "1 stone is" if stones == 1 else f"{stones} stones are"
    return f"{left} left. Take 1, 2 or 3. How many do you take?"


def last_digit(text: str) -> int:
    """Return the last digit of a text, 0 where it has none."""
    return next((int(one) for one in reversed(text) if one in DIGITS), 0)


gymnasium.register(id="Nim-v0", entry_point=Nim)
