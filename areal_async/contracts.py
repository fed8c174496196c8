"""What user code sees: the policy it talks to, the replies it gets, and the shape of a workflow.

    async def gsm8k(prompt: Prompt, policy: Policy) -> float: ...

A workflow needs nothing else of this package, and nothing here knows where or how generation runs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_async.types import Prompt

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` as chat templates take it."""

Rewards = float | Mapping[str, float]
"""One number for the trajectory, or ``{reply.id: reward}`` for credit per turn."""


ToolLike = Callable[..., Any] | Mapping[str, Any]
"""A plain typed function, async or not; or a schema as OpenAI writes it, of a tool that the workflow runs itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """What the model wants to have called."""

    id: str
    name: str
    arguments: dict[str, Any]
    """As the model wrote them, unchecked."""
    error: str = ""
    """Why what it wrote is no call (``name`` may then be empty); empty when it is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What the model is told came of a call."""

    call: ToolCall
    text: str
    is_error: bool
    """The call was no call, did not fit, or the function raised or ran past its deadline; ``text`` says which."""

    @property
    def message(self) -> dict[str, Any]:
        """Append this to answer the call."""
        name = {"name": self.call.name} if self.call.name else {}
        return {"role": "tool", "tool_call_id": self.call.id, **name, "content": self.text}


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
    tool_calls: list[ToolCall] = field(default_factory=list)
    """What the model calls, where it was given tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """A conversation in which the model has used tools."""

    messages: list[Message]
    """The whole of it, the last reply included: append to it to go on."""
    replies: list[Reply]
    """One per turn of the model, oldest first."""
    results: list[ToolResult]
    """Of every call that was run, oldest first."""

    @property
    def reply(self) -> Reply:
        """The last one."""
        return self.replies[-1]

    @property
    def text(self) -> str:
        """What the model said last."""
        return self.reply.text

    @property
    def is_finished(self) -> bool:
        """Whether the model ended by itself: its last reply calls nothing. Else ``max_turns`` ended it."""
        return not self.reply.tool_calls


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
