"""Episodes of environments with steps: each reply of the model is an action, each observation what it is told next.

A reply is worth what came after it: the reward of its own step and the discounted ones of later steps (its
return-to-go; Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.8). These are compared as the run's
algorithm has it (``algorithm.credit: returns``).
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from areal_async.api import Message, Policy, Rewards
from areal_async.environments.environment import MAX_TASKS, Options, content_hash, note_metrics
from areal_async.errors import ContextFull, WorkflowError

MAX_OBSERVATION_CHARACTERS = 200_000
"""Of one observation; a longer one fits no context."""


class TurnOptions(Options):
    """Options that all environments with steps have."""

    system: str = ""
    """What the model is told before the first observation; empty for nothing."""
    max_turns: int = Field(default=16, ge=1, le=1024)
    """Replies of the model after which an episode ends, whether or not the environment is over."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward for each step that it came later."""
    credit: Literal["reply", "episode"] = "reply"
    """``reply`` gives each reply its own return, ``episode`` all of them the sum of all rewards."""
    step_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds that one ``reset`` or ``step`` may take; then the episode fails."""


class SeededOptions(TurnOptions):
    """Options of environments whose tasks are seeds: the first row has ``first_seed``, each further one the next."""

    num_tasks: int = Field(default=256, ge=1, le=MAX_TASKS)
    """Rows, each a seed."""
    first_seed: int = Field(default=0, ge=0, le=1 << 31)
    """The seed of the first row."""

    def rows(self, name: str, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield a task for each seed.

        Args:
            name: what their ids begin with.
            content: what each of them is beside its seed.
        """
        for seed in range(self.first_seed, self.first_seed + self.num_tasks):
            yield {"task_id": f"{name}-{seed}", "seed": seed, "sha256": content_hash({**content, "seed": seed})}


class Step(NamedTuple):
    """What an action came to."""

    observation: str
    reward: float
    is_over: bool


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return for each step its reward and the discounted ones of all later steps [K]."""
    returns: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


async def play(
    policy: Policy, observation: str, step: Callable[[str], Awaitable[Step]], options: TurnOptions, *, what: str
) -> Rewards:
    """Have a policy act until the environment is over, or there are no turns or no room for another answer left.

    Args:
        observation: the first one.
        step: takes what the model said.
        what: the environment is, as a sentence begins with it.

    Raises:
        ContextFull: the first observation leaves no room for an answer.
        WorkflowError: an observation is too long, or a reward is no finite number.
    """
    said: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    replies: list[str] = []
    rewards: list[float] = []
    is_over = False
    while not is_over and len(replies) < options.max_turns:
        if len(observation) > MAX_OBSERVATION_CHARACTERS:
            raise WorkflowError(
                f"{what}: got an observation of {len(observation):,} characters, need at most "
                f"{MAX_OBSERVATION_CHARACTERS:,}"
            )
        said.append({"role": "user", "content": observation})
        try:
            reply = await policy.chat(said)
        except ContextFull:
            if not replies:
                raise
            break
        said.append(reply.message)
        observation, reward, is_over = await step(reply.text)
        if not math.isfinite(reward):
            raise WorkflowError(f"{what}: step {len(replies)} gave the reward {reward}, need a finite number")
        replies.append(reply.id)
        rewards.append(reward)
    note_metrics(policy, {"num_steps": len(rewards), "return": sum(rewards), "is_over": is_over})
    if options.credit == "episode":
        return sum(rewards)
    return dict(zip(replies, returns_to_go(rewards, options.gamma), strict=True))
