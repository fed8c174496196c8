"""One sibling: the workflow runs under its deadline, and whatever happens becomes a trajectory.

Invariant: ``run_episode`` returns a trajectory for every way in which user code can end, except
cancellation and errors that end the process.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from areal_async.api import Workflow
from areal_async.errors import Reject, RolloutError, WorkflowError
from areal_async.protocol.types import Prompt, Trajectory
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.rewards.reply_rewards import Scores
from areal_async.rollout.slots import Ending, SlotSpec, fill_slot, scores_of
from areal_async.rollout.user_code.boundary import attributed_to
from areal_async.rollout.user_code.task_scope import RanPast, run_owned


async def call_user_code(
    call: Callable[[], Awaitable[object]], policies: Sequence[RecordingPolicy], *, name: str, deadline_s: float
) -> object:
    """Run a workflow to what it returns, and close the policies that it talked to.

    Raises:
        RolloutError: it raised, or ran past the deadline.
        Reject: it withdrew.
    """

    def close() -> None:
        for policy in policies:
            policy.close()

    async def run() -> object:
        try:
            return await call()
        finally:
            close()

    with attributed_to(WorkflowError, what := f"workflow {name}"):
        try:
            return await run_owned(run, name=what, deadline_s=deadline_s)
        except RanPast:
            raise WorkflowError(f"{what}: ran past rollout.episode_deadline_s = {deadline_s:g} s") from None
        finally:
            close()


async def call_workflow(
    workflow: Workflow, prompt: Prompt, policy: RecordingPolicy, *, name: str, deadline_s: float
) -> Scores:
    """Run user code to its rewards.

    Raises:
        RolloutError: it raised, ran past the deadline, returned no reward, or never called the model.
        Reject: it withdrew.
    """
    returned = await call_user_code(lambda: workflow(prompt, policy), [policy], name=name, deadline_s=deadline_s)
    with attributed_to(WorkflowError, f"workflow {name}"):
        return scores_of(returned, policy, name)


async def run_episode(
    workflow: Workflow, prompt: Prompt, policy: RecordingPolicy, place: SlotSpec, *, deadline_s: float
) -> Trajectory:
    """Run one sibling and return what fills its slot."""
    started = time.monotonic()
    ending: Ending
    try:
        ending = await call_workflow(workflow, prompt, policy, name=place.workflow, deadline_s=deadline_s)
    except (Reject, RolloutError) as exc:
        ending = exc
    return fill_slot(policy, ending, place, duration_s=time.monotonic() - started)
