"""An environment with steps: each reply is an action, and is worth the rewards that came from it on, discounted."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.api import Message, Policy, Reply, Rewards
from areal_async.environments.turns import MAX_OBSERVATION_CHARACTERS, Step, TurnOptions, play, returns_to_go
from areal_async.errors import ContextFull, WorkflowError


class Scripted:
    """Says what a test wrote down, as a policy does; a full context is where there is nothing more to say."""

    def __init__(self, *texts: str) -> None:
        self._texts = [*texts]
        self.info: dict[str, float] = {}
        self.heard: list[Sequence[Message]] = []

    async def chat(self, messages: Sequence[Message], **_: Any) -> Reply:
        self.heard.append([*messages])
        if not self._texts:
            raise ContextFull(9, most=1, setting="inference.context_length")
        text, number = self._texts.pop(0), len(self.heard)
        message = {"role": "assistant", "content": text}
        return Reply(id=f"r{number}", text=text, message=message, token_ids=[1], logprobs=[0.0], finish_reason="stop")


def stepping(*steps: Step) -> Callable[[str], Awaitable[Step]]:
    left = [*steps]

    async def step(_: str) -> Step:
        return left.pop(0)

    return step


def played(policy: Scripted, *steps: Step, **options: Any) -> Rewards:
    async def run() -> Rewards:
        spoken_to = cast(Policy, policy)
        return await play(spoken_to, "go", stepping(*steps), TurnOptions.model_validate(options), what="test")

    return anyio.run(run)


def test_a_return_is_the_reward_and_the_discounted_later_ones() -> None:
    assert returns_to_go([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert returns_to_go([], 0.5) == []


@given(st.lists(st.floats(-10, 10), max_size=20), st.floats(0, 1))
def test_returns_are_the_sums_of_their_definition(rewards: list[float], gamma: float) -> None:
    defined = [sum(gamma**later * one for later, one in enumerate(rewards[k:])) for k in range(len(rewards))]

    assert returns_to_go(rewards, gamma) == pytest.approx(defined)


def test_each_reply_has_its_return_and_hears_what_came_of_the_last() -> None:
    policy = Scripted("a", "b")

    rewards = played(policy, Step("next", 1.0, False), Step("end", 2.0, True), gamma=0.5, system="play")

    assert rewards == {"r1": 2.0, "r2": 2.0}
    assert [message["content"] for message in policy.heard[1]] == ["play", "go", "a", "next"]
    assert policy.info == {"env/num_steps": 2.0, "env/return": 3.0, "env/is_over": 1.0}


def test_an_episode_may_be_worth_one_number() -> None:
    assert played(Scripted("a", "b"), Step("", 1.0, False), Step("", 2.0, True), credit="episode") == 3.0


@pytest.mark.parametrize("options", [{"max_turns": 1}, {}], ids=["no turns left", "no room left"])
def test_what_is_not_over_ends_with_the_turns_and_with_the_room(options: dict[str, Any]) -> None:
    policy = Scripted("a")

    assert played(policy, Step("next", 1.0, False), **options) == {"r1": 1.0}
    assert policy.info["env/is_over"] == 0.0


def test_a_first_observation_without_room_is_the_trajectorys_failure() -> None:
    with pytest.raises(ContextFull):
        played(Scripted())


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (Step("x" * (MAX_OBSERVATION_CHARACTERS + 1), 0.0, False), "got an observation of 200,001 characters"),
        (Step("", float("nan"), True), "step 0 gave the reward nan, need a finite number"),
    ],
)
def test_what_cannot_be_told_or_trained_is_a_failure_with_its_reason(step: Step, sentence: str) -> None:
    with pytest.raises(WorkflowError, match=sentence):
        played(Scripted("a", "b"), step)
