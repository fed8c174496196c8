"""A program that is given nothing but an address and a key is recorded like a workflow, and killed with it."""

import anyio
import pytest

from areal_async.errors import RolloutError
from areal_async.rollout.endpoint.policy import heeding
from areal_async.rollout.merge import merge_turns
from areal_async.types import Prompt
from tests.unit.rollout.endpoint.places import served, speaker
from workflows.openai_agent import openai_agent

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]  # a Python and its imports for each test

PROMPT = Prompt(epoch=0, index=0, row={"question": "Each of 12 boxes holds 7 cakes. How many?", "answer": "#### 84"})
CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"12*7"}}</tool_call>'


async def test_program_calls_its_tools_and_is_one_sequence() -> None:
    async with served(speaker(CALL, "It has 84 cakes.")) as policy:
        reward = await openai_agent(PROMPT, policy)

        assert reward == 1.0
        assert len(policy.turns) == 2
        assert len(merge_turns(policy.turns)) == 1
        assert policy.num_breaks == 0


async def test_program_that_fails_is_the_workflow_s_failure() -> None:
    async with served(speaker()) as policy:  # the script has no answer for it
        with pytest.raises(RolloutError, match="endpoint"):
            await heeding(openai_agent, policy, name="openai_agent")(PROMPT, policy)


async def test_program_ends_with_its_workflow() -> None:
    async with served(speaker()) as policy:
        with anyio.move_on_after(0.2) as scope:
            await openai_agent(PROMPT, policy)

    assert scope.cancelled_caught
