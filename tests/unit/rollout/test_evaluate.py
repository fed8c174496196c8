"""A held-out row has a reward or an error, whatever its workflow does."""

from typing import Any, cast

import pytest

from areal_async.api import Policy
from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.errors import Reject, WorkflowError
from areal_async.protocol.evaluations import EvalTicket
from areal_async.protocol.types import Prompt
from areal_async.protocol.wire import encode
from areal_async.rollout.evaluate import answer_row
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.user_code.loop_block_report import Work
from tests.unit.rollout.byte_model import END, ScriptedModel, codec

pytestmark = pytest.mark.anyio


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not a word")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (1.0, ""),
        (None, "workflow w: returned None"),
        (WorkflowError(""), "WorkflowError"),
        (Mute(), "workflow w: Mute"),
        (ValueError("\ud800"), "workflow w: ValueError: ?"),
        (Reject(Mute()), "rejected: "),
        (KeyboardInterrupt(), "workflow w: KeyboardInterrupt"),
    ],
)
async def test_a_row_ends_with_its_reward_or_its_error(settings: Settings, action: Any, error: str) -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> Any:
        await policy.complete([1])
        if isinstance(action, BaseException):
            raise action
        return action

    node = NodeContext(
        settings=settings,
        bus=cast(Bus, None),
        node_id="0",
        generator=ScriptedModel([98, END]),
        codec=codec(),
        workflows={"w": workflow},
    )

    ticket = EvalTicket(eval_id="1-0", index=3, workflow="w", row={})

    work = Work(workflow="w", name="1-0/3", eval_ticket=ticket)
    policy = node.policy(settings.eval_sampling_of("w"), "eval.1-0.3")

    result = await answer_row(node, policy, ticket, Prompt(epoch=0, index=3, row={}), work, settings=settings)

    assert result.error.startswith(error)
    assert bool(result.error) is bool(error)
    assert encode(result)


def test_a_workflow_is_looked_at_once_until_the_settings_change(settings: Settings) -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        return 1.0

    node = NodeContext(
        settings=settings,
        bus=cast(Bus, None),
        node_id="0",
        generator=ScriptedModel([98, END]),
        codec=codec(),
        workflows={"w": workflow},
    )
    first = node.workflow("w", node.now)
    assert node.workflow("w", node.now) is first

    node.now = settings.model_copy()

    assert node.workflow("w", node.now).settings is node.now
