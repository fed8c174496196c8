"""A workflow that is called as a node calls it, with a policy that says what a test tells it to."""

from collections.abc import Callable, Sequence
from typing import Any

from areal_async.config.settings import SamplingSettings, Settings
from areal_async.protocol.types import Prompt, Trajectory
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.slots import SlotSpec
from areal_async.rollout.workflow_call import TaskWorkflow, WorkflowCall
from tests.unit.rollout.byte_model import codec

PROMPT = Prompt(epoch=0, index=0, row={"question": "q"})


def policy_of(model: Generator, *, name: str = "uid") -> ServedPolicy:
    return PolicyMaker(generator=model, codec=codec()).policy(SamplingSettings(), name)


def slot_of(sibling: int, **bounds: Any) -> SlotSpec:
    given = {"sample_uid": "uid", "ticket_version": "1-1", "max_bytes": 1 << 20, "max_sequence_tokens": 100}
    return SlotSpec(workflow="w", sibling=sibling, **given | bounds)


def call_of(
    function: Callable[..., Any],
    policies: Sequence[ServedPolicy],
    *,
    settings: Settings | None = None,
    deadline_s: float = 60.0,
) -> WorkflowCall:
    return WorkflowCall(TaskWorkflow("w", function, settings or Settings()), policies, deadline_s=deadline_s)


async def fill_one(
    function: Callable[..., Any], policy: ServedPolicy, slot: SlotSpec, *, deadline_s: float = 60.0
) -> Trajectory:
    """Run one sibling."""
    (trajectory,) = await call_of(function, [policy], deadline_s=deadline_s).fill(PROMPT, [slot])
    return trajectory
