"""One call of a user's workflow, and everything that stands around the user's coroutine.

A ``TaskWorkflow`` is what can be called, a ``WorkflowCall`` calls it once: for one sibling, or for a whole group.
Invariant: ``WorkflowCall.fill`` returns a trajectory for each sibling for every way in which user code can end, except
cancellation of who awaits it and errors that end the process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import msgspec

from areal_async.api import GroupWorkflow, Policy, RewardModel, Workflow, is_group_workflow
from areal_async.config.settings import Settings
from areal_async.errors import Reject, RolloutError, WorkflowError
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.types import Prompt, Trajectory
from areal_async.rollout.endpoint.policy import ServedPolicy
from areal_async.rollout.named_policies import FrozenModel, FrozenReward, role_sampling
from areal_async.rollout.publish import fit_one_message
from areal_async.rollout.rewards.number import check_awaited
from areal_async.rollout.rewards.reply_rewards import Ending, ending_of
from areal_async.rollout.slots import SlotSpec, fill_slot
from areal_async.rollout.user_code.boundary import attributed_to, forget_frames, shown
from areal_async.rollout.user_code.task_scope import DeadlineExceeded, TaskScope
from areal_async.rollout.user_code.workflows import policies_taken


class TaskWorkflow:
    """The workflow of one task, with the settings that hold for its calls and the policies that it is given by name."""

    def __init__(
        self,
        name: str,
        function: Workflow | GroupWorkflow,
        settings: Settings,
        frozen: Mapping[str, FrozenModel | FrozenReward] | None = None,
    ) -> None:
        """Look at which policies the function takes.

        Args:
            name: of the task.
            settings: of the run; those of the task among them are ``rollout``.
            frozen: models that are not trained, by the names of their policies.

        Raises:
            UserError: it needs a policy that the settings do not have.
        """
        self.name = name
        self.settings = settings
        self.rollout = settings.rollout_of(name)
        self.sees_group = is_group_workflow(function)
        """Whether one call has the policies of all siblings."""
        self._function: Callable[..., Any] = function
        self._taken = policies_taken(function, settings.policies)
        self._frozen = frozen or {}

    def slot(self, group_id: str, sibling: int, *, producer: str, version: str) -> SlotSpec:
        """Return a slot that a call is to fill, with the bounds that the settings have for it.

        Args:
            version: the ticket's.
        """
        return SlotSpec(
            workflow=self.name,
            sibling=sibling,
            sample_uid=f"{group_id}.{sibling}.{producer}",
            ticket_version=version,
            max_bytes=self.rollout.max_trajectory_bytes,
            max_sequence_tokens=self.settings.trainer.token_budget,
            max_credit_bytes=self.rollout.max_credit_bytes,
            one_reward_for=self.settings.algorithm.one_reward_for,
        )

    async def __call__(self, prompt: Prompt, policies: Sequence[ServedPolicy]) -> object:
        """Call the user's function with one policy, or with those of all siblings where it sees a group."""
        named = {name: self._named_policy(name, policies) for name in self._taken}
        return await self._function(prompt, list(policies) if self.sees_group else policies[0], **named)

    def _named_policy(self, name: str, policies: Sequence[ServedPolicy]) -> Policy | RewardModel | list[Policy]:
        own = self.settings.policies[name]
        if own.is_frozen:
            model = self._frozen[name]
            if isinstance(model, FrozenReward):
                return model
            sampling = own.sampling_over(self.rollout.sampling)
            return policies[0].beside(name, model.generator, model.codec, sampling)
        roles: list[Policy] = [one.in_role(name, role_sampling(own, one.sampling)) for one in policies]
        return roles if self.sees_group else roles[0]


class WorkflowCall:
    """The one object around a user's coroutine.

    In whose name it runs: a ``TaskScope``, ``workflow NAME``, which knows what it works on (``work``).
    Its deadline: ``deadline_s``, the task's ``rollout.episode_deadline_s`` unless told otherwise.
    What ends it: its return, what it raises, its deadline, or the cancellation of who awaits the call.
    How an error is classified: an error of ours and ``Reject`` pass, anything else becomes a ``WorkflowError``. Where a
    request of its agent has failed, and none was answered since, that failure is the cause.
    What is left behind: nothing. Its policies are closed and all tasks of its scope have ended before the call returns.
    """

    def __init__(
        self,
        workflow: TaskWorkflow,
        policies: Sequence[ServedPolicy],
        *,
        work: object = None,
        deadline_s: float | None = None,
        clock: PausableClock | None = None,
        keeps_error: bool = False,
    ) -> None:
        """Take one policy for each sibling that the call is for.

        Args:
            clock: that its deadline goes by; None for one that never stops.
            keeps_error: for who shows where it was raised.
            work: what is told of who holds up the event loop (``loop_block_report.Work``).
            deadline_s: in seconds; ``None`` takes the task's.
        """
        self.error: BaseException | None = None
        """What the user's function raised, whatever that was, with its traceback, where that is kept."""
        self._keeps_error = keeps_error
        self._workflow = workflow
        self._policies = policies
        self._what = f"workflow {workflow.name}"
        self._work = work
        self._clock = clock
        self._deadline_s = workflow.rollout.episode_deadline_s if deadline_s is None else deadline_s
        self._agent_failures: list[list[RolloutError]] = [[] for _ in policies]
        """What the last requests of each sibling's agents came to, as the function ended."""

    async def fill(self, prompt: Prompt, slots: Sequence[SlotSpec]) -> list[Trajectory]:
        """Call the workflow with a prompt of its own and return what fills the siblings' slots.

        The trajectories of a whole group fit one message: who gets the ticket again finds all of them or none.
        """
        started_s = time.monotonic()
        endings = await self._endings(msgspec.structs.replace(prompt, row=deepcopy(prompt.row)))
        duration_s = time.monotonic() - started_s
        filled = [
            fill_slot(policy, ending, slot, duration_s=duration_s)
            for policy, ending, slot in zip(self._policies, endings, slots, strict=True)
        ]
        self._forget(endings)
        if not self._workflow.sees_group:
            return filled
        return fit_one_message(filled, max_bytes=self._workflow.rollout.max_payload_bytes)

    async def endings(self, prompt: Prompt) -> list[Ending]:
        """Return how the call ended for each sibling."""
        endings = await self._endings(prompt)
        self._forget(endings)
        return endings

    async def _endings(self, prompt: Prompt) -> list[Ending]:
        try:
            returned = await self.run(prompt)
            with attributed_to(WorkflowError, self._what):
                outcomes = self._one_each(returned)
        except (Reject, RolloutError) as exc:
            return [exc] * len(self._policies)
        name, sees_group = self._workflow.name, self._workflow.sees_group
        return [
            ending_of(outcome, policy.reply_ids, name, failures=failures, may_withdraw=sees_group)
            for outcome, policy, failures in zip(outcomes, self._policies, self._agent_failures, strict=True)
        ]

    def _forget(self, endings: Sequence[Ending]) -> None:
        if self._keeps_error:
            return
        for error in chain(endings, *self._agent_failures):
            if isinstance(error, BaseException):
                forget_frames(error)

    async def run(self, prompt: Prompt) -> object:
        """Return what the user's function returns, unchecked.

        Raises:
            RolloutError: it raised, or ran past its deadline.
            Reject: it withdrew.
        """
        try:
            scope = TaskScope(self._what, self._work)
            return await scope.run(
                self._call(prompt), deadline_s=self._deadline_s, clock=self._clock, keeps_frames=self._keeps_error
            )
        except DeadlineExceeded:
            raise WorkflowError(f"{self._what}: ran past rollout.episode_deadline_s = {self._deadline_s:g} s") from None
        finally:
            self._close()

    async def _call(self, prompt: Prompt) -> object:
        """Be the coroutine of the scope's first task."""
        try:
            with attributed_to(WorkflowError, self._what):
                try:
                    return await self._workflow(prompt, self._policies)
                except BaseException as exc:
                    if self._keeps_error:
                        self.error = exc
                    raise
        except RolloutError as exc:
            for failure in (failure for policy in self._policies for failure in policy.failures):
                raise failure from exc  # what an agent was denied last is why the function raised
            raise
        finally:
            self._agent_failures = [policy.failures for policy in self._policies]
            self._close()

    def _close(self) -> None:
        for policy in self._policies:
            policy.close()

    def _one_each(self, returned: object) -> Sequence[object]:
        if not self._workflow.sees_group:
            return [returned]
        check_awaited(returned, got="group workflow: returned", error=WorkflowError)
        num_siblings = len(self._policies)
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != num_siblings:
            raise WorkflowError(
                f"group workflow: returned {shown(returned)}, need a sequence of {num_siblings}, one for each sibling: "
                "a float, {reply.id: reward} or Reject(...)"
            )
        return list(returned)
