"""The policies that a workflow takes beside ``policy``, made anew for every trajectory and given to it by name.

A *role* is the model under training under another name: its turns are in the trajectory, with its name on them. A
*frozen* policy is another model: it has servers of its own, and none of its tokens is ever in a trajectory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_async.contracts import GroupWorkflow, Policy, Rewards, Workflow, group_workflow, is_group_workflow
from areal_async.errors import Reject, UserError
from areal_async.inference.pool import Pool
from areal_async.rollout.endpoint.policy import ServedPolicy
from areal_async.rollout.policy import Generator
from areal_async.rollout.text import TextCodec
from areal_async.settings import PolicySettings, SamplingSettings, Settings
from areal_async.types import Prompt

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that is never trained, as a node has it."""

    generator: Generator
    codec: TextCodec
    pool: Pool


def with_policies(
    workflow: Callable[..., Any], names: Collection[str], settings: Settings, frozen: Mapping[str, FrozenModel]
) -> Workflow | GroupWorkflow:
    """Return the workflow as one that takes ``policy`` alone (or the siblings); it is given the others by name.

    Args:
        names: of the policies that it takes, each in ``settings.policies``; of a group workflow, frozen ones alone.
        frozen: the models of those that are frozen.

    Raises:
        UserError: a group workflow takes a role.
    """
    if not names:
        return workflow
    if is_group_workflow(workflow):
        roles = [name for name in names if not settings.policies[name].is_frozen]
        if roles:
            raise UserError(
                f"policies.{roles[0]}: got a role of the trained model for a group workflow, need a frozen one (path); "
                "its siblings each are the trained model"
            )

        @group_workflow
        async def run_together(prompt: Prompt, siblings: Sequence[Policy]) -> Sequence[Rewards | Reject]:
            first = siblings[0]
            assert isinstance(first, ServedPolicy), "policies are made beside those of a node"
            others = {name: _policy(first, name, settings, frozen) for name in names}
            outcomes: Sequence[Rewards | Reject] = await workflow(prompt, siblings, **others)
            return outcomes

        return run_together

    async def run(prompt: Prompt, policy: Policy) -> Rewards:
        assert isinstance(policy, ServedPolicy), "roles are made of the policy of a node"
        others = {name: _policy(policy, name, settings, frozen) for name in names}
        rewards: Rewards = await workflow(prompt, policy, **others)
        return rewards

    return run


def _policy(policy: ServedPolicy, name: str, settings: Settings, frozen: Mapping[str, FrozenModel]) -> ServedPolicy:
    own = settings.policies[name]
    if own.is_frozen:
        sampling = own.sampling_over(settings.rollout.sampling)
        return policy.beside(name, frozen[name].generator, frozen[name].codec, sampling)
    return policy.in_role(name, role_sampling(own, policy.sampling))


def role_sampling(own: PolicySettings, sampling: SamplingSettings) -> SamplingSettings:
    """Return how a role samples beside a ``policy`` that samples like this: greedily where it does, in evaluation."""
    own_sampling = own.sampling_over(sampling)
    return own_sampling if sampling.temperature else own_sampling.model_copy(update=GREEDY)
