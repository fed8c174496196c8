"""The reward of `judge` is what the grader wrote; whether the answer is right is only told."""

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.errors import RewardError
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from rewards.judge import score_request
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from workflows.judge import TEMPLATE, judge

pytestmark = pytest.mark.anyio

PROMPT = Prompt(epoch=0, index=0, row={"question": "What is 3+4?", "answer": "3+4=7\n#### 7"})


def speaker(text: str) -> tuple[RecordingPolicy, ScriptedModel]:
    model = ScriptedModel([*text.encode(), END])
    return RecordingPolicy(model, codec(), SamplingSettings(), name="uid"), model


@pytest.mark.parametrize(("score", "reward"), [("Score: 10", 1.0), ("Score: 2", 0.2), ("Score: 0", 0.0)])
async def test_reward_is_the_grader_s_and_the_truth_stands_beside_it(score: str, reward: float) -> None:
    policy, _ = speaker("#### 8")
    grader, model = speaker(f"Expected 7, got 8. {score}")

    assert await judge(PROMPT, policy, grader) == pytest.approx(reward)

    assert policy.info == {"right": 0.0}
    request = score_request(TEMPLATE, question="What is 3+4?", answer="#### 8", reference="3+4=7\n#### 7")
    assert request in codec().decode(model.calls[0][0])


async def test_grader_that_gives_no_score_fails_the_trajectory() -> None:
    policy, _ = speaker("#### 7")
    grader, _ = speaker("Well done!")

    with pytest.raises(RewardError, match="Well done!"):
        await judge(PROMPT, policy, grader)
