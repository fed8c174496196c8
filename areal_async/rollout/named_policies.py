"""The policies that a workflow takes beside ``policy``, made anew for every trajectory and given to it by name.

A *role* is the model under training under another name: its turns are in the trajectory, with its name on them. A
*frozen* policy is another model: it has servers of its own, and none of its tokens is ever in a trajectory. A *reward
model* is frozen too, and only scores.

A workflow that is given a list of siblings takes what is frozen once, for all of them, and a role as a list: one for
each sibling, in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from areal_async.api import Message
from areal_async.config.settings import PolicySettings, SamplingSettings
from areal_async.errors import WorkflowError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.inference.pool import ServerPool
from areal_async.inference.scoring import ScoringClient
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.policy.images import has_images
from areal_async.rollout.policy.messages import checked_messages
from areal_async.rollout.policy.offload import beside_if_long
from areal_async.rollout.policy.text import ContextRoom, TextCodec
from areal_async.rollout.user_code.task_scope import unscoped


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that is never trained, as a node has it."""

    generator: Generator
    codec: TextCodec
    pool: ServerPool
    call_parser: EngineCallParser | None = None
    """As ``PolicyMaker.call_parser``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenReward:
    """A reward model, as a node has it and as workflows take it (``contracts.RewardModel``)."""

    scorer: ScoringClient
    codec: TextCodec
    pool: ServerPool

    async def score(self, messages: Sequence[Message]) -> float:
        """Score a whole conversation, rendered by the reward model's own chat template."""
        messages = checked_messages(messages)
        if has_images(messages):
            raise WorkflowError("reward model: got an image, need text alone; leave images out of what it is to score")
        prompt_ids = await beside_if_long(partial(self._tokenized, messages), messages)
        with unscoped():
            return await self.scorer.score(prompt_ids)

    def _tokenized(self, messages: list[Message]) -> list[int]:
        """Return the prompt; one that fits into no server is refused before it is tokenized."""
        self.codec.check_roles(messages)
        text = self.codec.render(messages, for_reply=False)
        rooms = [server.context_tokens for server in self.pool.servers.values()]
        if known := [tokens for tokens in rooms if tokens is not None]:
            ContextRoom(max(known), "inference.context_length or the reward model's").check_length(text)
        return self.codec.encode(text)


def role_sampling(own: PolicySettings, sampling: SamplingSettings) -> SamplingSettings:
    """Return how a role samples beside a ``policy`` that samples like this: greedily where it does, in evaluation."""
    own_sampling = own.sampling_over(sampling)
    return own_sampling if sampling.temperature else own_sampling.greedy
