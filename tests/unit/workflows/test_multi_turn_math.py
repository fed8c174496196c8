"""A wrong answer is told so and tried again; every try is worth the last one's reward, discounted."""

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from workflows.multi_turn_math import multi_turn_math

pytestmark = pytest.mark.anyio

PROMPT = Prompt(epoch=0, index=0, row={"question": "6 times 7?", "answer": "#### 42"})


@pytest.mark.parametrize(
    ("said", "returns", "solved", "solved_at_once"),
    [
        (["42"], [1.0], 1.0, 1.0),
        (["41", "42"], [0.5, 1.0], 1.0, 0.0),
        (["41", "no", "#### 42"], [0.25, 0.5, 1.0], 1.0, 0.0),
        (["1", "2", "3", "42"], [0.0, 0.0, 0.0], 0.0, 0.0),
    ],
)
async def test_every_try_is_worth_the_last_ones_reward_discounted(
    said: list[str], returns: list[float], solved: float, solved_at_once: float
) -> None:
    model = ScriptedModel(*([*text.encode(), END] for text in said))
    policy = RecordingPolicy(model, codec(), SamplingSettings(), name="uid")

    rewards = await multi_turn_math(PROMPT, policy)

    assert [rewards[f"uid.{number + 1}"] for number in range(len(returns))] == returns
    assert policy.info == {"solved": solved, "solved_at_once": solved_at_once}
    assert len(merge_turns(policy.turns)) == 1
