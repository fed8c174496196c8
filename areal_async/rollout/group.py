"""A whole group in one call: the workflow sees all siblings, and they are stored together or not at all.

Invariant: what one call leaves fits one message, so that whoever gets the ticket again finds all of it or nothing.
"""

import time
from collections.abc import Sequence
from typing import cast

import msgspec

from areal_async.api import GroupWorkflow, Policy, Rewards, Workflow, is_group_workflow
from areal_async.errors import Reject, RolloutError, WorkflowError
from areal_async.protocol.types import Prompt, Trajectory
from areal_async.protocol.wire import max_encoded_bytes
from areal_async.rollout.endpoint.policy import ServedPolicy
from areal_async.rollout.episode import call_user_code
from areal_async.rollout.publish import MAX_HEADER_BYTES, header_bytes
from areal_async.rollout.rewards.number import check_awaited
from areal_async.rollout.slots import MAX_REASON_CHARACTERS, Ending, SlotSpec, failed_trajectory, fill_slot, scores_of
from areal_async.rollout.user_code.boundary import attributed_to, shown

MIN_REASON_CHARACTERS = 60


async def run_group_episode(
    workflow: GroupWorkflow,
    prompt: Prompt,
    policies: Sequence[ServedPolicy],
    places: Sequence[SlotSpec],
    *,
    deadline_s: float,
    max_bytes: int,
) -> list[Trajectory]:
    """Run all siblings of a group and return what fills their slots.

    Args:
        policies: one for each of ``places``.
        max_bytes: of one message's payload.
    """
    started, name = time.monotonic(), places[0].workflow
    endings: list[Ending]
    try:
        returned = await call_user_code(
            lambda: _heeded(workflow, prompt, policies, name), policies, name=name, deadline_s=deadline_s
        )
        endings = _endings(returned, policies, name)
    except (Reject, RolloutError) as exc:
        endings = [exc] * len(places)
    duration_s = time.monotonic() - started
    filled = [
        fill_slot(policy, ending, place, duration_s=duration_s)
        for policy, ending, place in zip(policies, endings, places, strict=True)
    ]
    return fit_one_message(filled, max_bytes=max_bytes)


def fit_one_message(trajectories: Sequence[Trajectory], *, max_bytes: int) -> list[Trajectory]:
    """Return the trajectories of a group as they can travel in one message; too large ones as recorded failures."""
    num_header_bytes = sum(header_bytes(_told_in(one, MIN_REASON_CHARACTERS)) for one in trajectories)
    num_bytes = sum(map(max_encoded_bytes, trajectories))
    if num_bytes > max_bytes or num_header_bytes > MAX_HEADER_BYTES:
        reason = (
            f"group: got {num_bytes} bytes and {num_header_bytes} of headers, need at most {max_bytes} "
            f"(rollout.max_trajectory_bytes) and {MAX_HEADER_BYTES}: a group workflow's siblings share one message; "
            "generate less, or lower rollout.group_size"
        )
        trajectories = [failed_trajectory(one.slot, reason) for one in trajectories]
    fitted, num_characters = list(trajectories), MAX_REASON_CHARACTERS
    while sum(map(header_bytes, fitted)) > MAX_HEADER_BYTES and num_characters > MIN_REASON_CHARACTERS:
        num_characters = max(MIN_REASON_CHARACTERS, num_characters * 3 // 4)
        fitted = [_told_in(one, num_characters) for one in trajectories]
    return fitted


def for_one_sibling(workflow: Workflow | GroupWorkflow) -> Workflow:
    """Return a workflow for a single sibling; one that sees a whole group is called with a group of one."""
    if not is_group_workflow(workflow):
        return cast(Workflow, workflow)

    async def run(prompt: Prompt, policy: Policy) -> Rewards:
        (outcome,) = _one_each(await workflow(prompt, [policy]), 1)
        if isinstance(outcome, Reject):
            raise outcome
        return outcome  # type: ignore[return-value]  # checked as what any workflow returns

    return run


async def _heeded(workflow: GroupWorkflow, prompt: Prompt, policies: Sequence[ServedPolicy], name: str) -> object:
    """Run the workflow; where it raises, an agent's failed request is the cause (``endpoint.policy.heeding``)."""
    try:
        with attributed_to(WorkflowError, f"workflow {name}"):
            return await workflow(prompt, list(policies))
    except RolloutError as exc:
        for policy in policies:
            if policy.failure is not None:
                raise policy.failure from exc
        raise


def _endings(returned: object, policies: Sequence[ServedPolicy], name: str) -> list[Ending]:
    with attributed_to(WorkflowError, f"workflow {name}"):
        outcomes = _one_each(returned, len(policies))
    return [_ending(outcome, policy, name) for outcome, policy in zip(outcomes, policies, strict=True)]


def _ending(outcome: object, policy: ServedPolicy, name: str) -> Ending:
    if isinstance(outcome, Reject):
        return outcome
    try:
        policy.check_heard()
        with attributed_to(WorkflowError, f"workflow {name}"):
            return scores_of(outcome, policy, name)
    except RolloutError as exc:
        return exc


def _one_each(returned: object, num_siblings: int) -> list[object]:
    check_awaited(returned, got="group workflow: returned", error=WorkflowError)
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != num_siblings:
        raise WorkflowError(
            f"group workflow: returned {shown(returned)}, need a sequence of {num_siblings}, one for each sibling: "
            "a float, {reply.id: reward} or Reject(...)"
        )
    return list(returned)


def _told_in(trajectory: Trajectory, num_characters: int) -> Trajectory:
    """Return it with a reason of so many characters at the most."""
    slot = trajectory.slot
    if len(slot.reason) <= num_characters:
        return trajectory
    return msgspec.structs.replace(trajectory, slot=msgspec.structs.replace(slot, reason=slot.reason[:num_characters]))
