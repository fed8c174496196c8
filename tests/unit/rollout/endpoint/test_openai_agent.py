"""An agent that is given nothing but an address and a key is recorded like a workflow, and ends with it."""

from typing import Any

import anyio
import pytest

from areal_async.errors import RolloutError
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.merge import merge_turns
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.called import call_of
from tests.unit.rollout.endpoint.scripted_endpoint import served, speaker
from workflows.openai_agent import openai_agent

pytestmark = pytest.mark.anyio

PROMPT = Prompt(epoch=0, index=0, row={"question": "Each of 12 boxes holds 7 cakes. How many?", "answer": "#### 84"})
CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"12*7"}}</tool_call>'


async def test_agent_calls_its_tools_and_is_one_sequence() -> None:
    async with served(speaker(CALL, "It has 84 cakes.")) as policy:
        reward = await openai_agent(PROMPT, policy)

        assert reward == 1.0
        assert len(policy.turns) == 2
        assert len(merge_turns(policy.turns)) == 1
        assert policy.record.num_breaks == 0


async def test_agent_that_fails_is_the_workflow_s_failure() -> None:
    async with served(speaker()) as policy:  # the script has no answer for it
        (ending,) = await call_of(openai_agent, [policy]).endings(PROMPT)

    assert isinstance(ending, RolloutError)
    assert "endpoint" in str(ending)


class Silent(ScriptedModel):
    """Is asked, and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = anyio.Event()
        self.was_left = anyio.Event()

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.was_asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.was_left.set()


async def test_what_the_agent_asked_for_ends_with_its_workflow() -> None:
    model = Silent()
    async with served(model) as policy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(openai_agent, PROMPT, policy)
            await model.was_asked.wait()
            tasks.cancel_scope.cancel()
        await model.was_left.wait()
