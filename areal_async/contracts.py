"""What user code sees: the policy it talks to, the replies it gets, and the shape of a workflow.

    async def gsm8k(prompt: Prompt, policy: Policy) -> float: ...

A workflow needs nothing else of this package, and nothing here knows where or how generation runs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_async.types import Prompt

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` as chat templates take it."""

Rewards = float | Mapping[str, float]
"""One number for the trajectory, or ``{reply.id: reward}`` for credit per turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the model said."""

    id: str
    text: str
    """Without special tokens."""
    message: dict[str, Any]
    """Append this, not the text, to go on with the conversation."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """``stop`` or ``length``."""


class Policy(Protocol):
    """The model under training, as one trajectory sees it. Every call is recorded token for token."""

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> Reply:
        """Answer a conversation, rendered by the model's chat template.

        Args:
            sampling: overrides of ``rollout.sampling`` for this call, by the same names.

        Raises:
            GenerationError: no server could finish it. Let it pass: it is recorded on the trajectory.
        """
        ...

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Go on from a text or from token ids, without a template."""
        ...


Workflow = Callable[[Prompt, Policy], Awaitable[Rewards]]
