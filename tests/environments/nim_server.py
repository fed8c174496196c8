"""Nim behind a server of the official OpenEnv package: ``python tests/environments/nim_server.py PORT``."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MOST = 3


class Move(Action):
    message: str


class Told(Observation):
    text: str


class Nim(Environment[Move, Told, State]):
    """Who takes the last stone wins, against a player who plays at random."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._stones = 0
        self._random = random.Random()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        """Begin a game."""
        self._random = random.Random(seed)
        self._stones = self._random.randint(2, 9)
        return Told(text=_question(self._stones))

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Told:
        """Take what the text says, and let the other one move."""
        taken = next((int(one) for one in reversed(action.message) if one in "0123456789"), 0)
        if not 1 <= taken <= min(MOST, self._stones):
            return Told(text="That is no move.", reward=0.0, done=True)
        self._stones -= taken
        if not self._stones:
            return Told(text="You win.", reward=1.0, done=True)
        self._stones -= self._random.randint(1, min(MOST, self._stones))
        if not self._stones:
            return Told(text="You lose.", reward=0.1, done=True)
        return Told(text=_question(self._stones), reward=0.1)

    @property
    def state(self) -> State:
        """Return nothing of interest."""
        return State()


def _question(stones: int) -> str:
    left = "1 stone is" if stones == 1 else f"{stones} stones are"
    return f"{left} left. Take 1, 2 or 3. How many do you take?"


if __name__ == "__main__":
    app = create_fastapi_app(Nim, Move, Told, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
