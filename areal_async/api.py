"""What user code sees: the policy it talks to, the replies it gets, and the shape of a workflow.

    async def gsm8k(prompt: Prompt, policy: Policy) -> float: ...

A workflow needs nothing else of this package, and nothing here knows where or how generation runs.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeGuard, TypeVar, overload, runtime_checkable

from areal_async.errors import Reject, UserError
from areal_async.protocol.types import Prompt

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` as chat templates take it.

A content is a text or a list of parts: ``{"type": "text", "text": ...}`` and, for a model that sees,
``{"type": "image", "image": ...}`` or OpenAI's ``{"type": "image_url", "image_url": {"url": "data:..."}}``. The first
takes an image of Pillow's, the bytes or the path of a file, a ``data:`` URL, and what a row has in a column of images.
An image is brought to the size that the model sees once, as it is given: that is what is recorded. A policy that a
run trains refuses images for now."""

Rewards = float | Mapping[str, float]
"""One number for the whole trajectory, or ``{reply.id: return}`` for credit reply by reply.

The value of a reply is its *return*: what it led to, with whatever later rewards and discount the workflow means by it.
Its tokens are trained with the advantage of that value over those of all credited replies of the group (of its role,
where several policies speak). Replies that are not named are not trained; ``rollout/num_uncredited`` counts them.
"""


@runtime_checkable
class DescribedTool(Protocol):
    """A tool that brings its own schema and runs itself, such as one of an MCP server (``mcp_tools``)."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema as OpenAI writes it: ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """Its own deadline for one call, in seconds; ``None`` takes the one of ``act``."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Run it on what the model wrote, unchecked. What it raises is told to the model."""
        ...


RunnableTool = Callable[..., Any] | DescribedTool
"""A plain typed function, async or not, or a tool that brings its schema.

What it returns is told to the model as text, but for images: one of Pillow's, or a list of parts of a content (and of
images of Pillow's) with at least one, are shown to it."""

ToolLike = RunnableTool | Mapping[str, Any]
"""What the model may be told of: a tool, or the schema alone, as OpenAI writes it, of one that the workflow runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """What the model wants to have called."""

    id: str
    name: str
    arguments: dict[str, Any]
    """Arguments as the model wrote them, unchecked."""
    error: str = ""
    """Why what it wrote is no call (``name`` may then be empty); empty when it is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What the model is told came of a call."""

    call: ToolCall
    text: str
    is_error: bool
    """The call was no call, did not fit, or the function raised or ran past its deadline; ``text`` says which."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """What the model is shown where that has images: parts of a content, in order. ``text`` has a word for each."""

    @property
    def message(self) -> dict[str, Any]:
        """Append this to answer the call."""
        name = {"name": self.call.name} if self.call.name else {}
        return {"role": "tool", "tool_call_id": self.call.id, **name, "content": self.parts or self.text}


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
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens at each position, likeliest first, as (token id, natural log of the probability) of what was
    sampled from before ``top_p``, ``top_k`` and ``min_p`` cut it; ``None`` where ``top_logprobs=`` did not ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """A conversation in which the model has used tools."""

    messages: list[Message]
    """The whole of it, the last reply included: append to it to go on."""
    replies: list[Reply]
    """One per turn of the model, oldest first."""
    results: list[ToolResult]
    """Result of every call that was run, oldest first."""

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
        """Whether the model ended by itself: its last reply calls nothing and is whole.

        Else ``max_turns``, the longest answer or a full context has ended it.
        """
        return not self.reply.tool_calls and self.reply.finish_reason != "length"


class ReplyStream(Protocol):
    """A reply while it is being said: ``async for piece in stream``, then ``stream.reply``.

    A reply that is not heard to its end is not recorded and never trained.
    """

    def __aiter__(self) -> AsyncIterator[str]: ...

    @property
    def reply(self) -> Reply:
        """The whole reply, once the last piece was had."""
        ...

    async def aclose(self) -> None:
        """Stop generating. ``async with`` does so too."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class Policy(Protocol):
    """The model under training, as one trajectory sees it. Every call is recorded token for token."""

    info: dict[str, float]
    """Numbers of the workflow's own: each key is averaged over a step's trajectories as ``info/<key>`` in
    ``metrics.jsonl``. Those that every trajectory has (``rollout/num_turns`` and the like) stand beside them."""

    @property
    def base_url(self) -> str:
        """Where any program that speaks OpenAI's or Anthropic's API finds this policy, with ``api_key``.

        What it is told is recorded like a call of ``chat``. Both end with the trajectory. The first use on a node
        starts its server.
        """
        ...

    @property
    def api_key(self) -> str:
        """A secret of this trajectory."""
        ...

    @overload
    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), n: None = None, **sampling: Any
    ) -> Reply: ...
    @overload
    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), n: int, **sampling: Any
    ) -> list[Reply]: ...
    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), n: int | None = None, **sampling: Any
    ) -> Reply | list[Reply]:
        """Answer a conversation, rendered by the model's chat template.

        Where it goes on from a recorded reply (append ``reply.message``), the reply keeps its tokens. Where the
        template writes earlier turns otherwise than before, or the workflow changed them, a new sequence starts
        and is counted (``rollout/num_breaks``).

        Args:
            tools: what the model may call; nothing is run, see ``reply.tool_calls``.
            n: so many replies at once, side by side, as a list.
            sampling: overrides of ``rollout.sampling`` for this call, by the same names, and what a single call may
                ask for besides: ``min_new_tokens``, ``stop_token_ids``, ``logit_bias`` ({token id: bias}), ``seed``,
                ``top_logprobs``, and one of the grammars ``json_schema``, ``regex``, ``ebnf`` and ``structural_tag``
                (``policy_settings.CallSampling``). Tokens are trained at the temperature that they were sampled at.

        Raises:
            GenerationError: no server could finish it. Let it pass: it is recorded on the trajectory.
            ContextFull: the conversation, its images included, leaves no room for an answer. Catch it to return a
                reward all the same. An answer for which there is some room is cut off there (``finish_reason`` is
                ``length``).
            WorkflowError: the template refuses the conversation, an argument is none that can be, or an image is none
                or is shown to a model that does not see.
        """
        ...

    def stream(self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), **sampling: Any) -> ReplyStream:
        """Answer a conversation piece by piece, otherwise as ``chat`` does."""
        ...

    async def act(
        self,
        messages: Sequence[Message],
        tools: Sequence[RunnableTool],
        *,
        max_turns: int = 8,
        tool_timeout_s: float = 30.0,
        **sampling: Any,
    ) -> Act:
        """Let the model answer a conversation with the help of tools.

        The calls of a reply are run one after the other and their results told to the model, until it calls nothing
        more. What a tool raises, arguments that do not fit and calls that are none are told to it as text.

        Args:
            tools: plain typed functions, async or not; the model is told their signatures and docstrings. One that is
                not async runs in a thread, and nothing of it may belong to the event loop. Tools that bring their
                schema (``DescribedTool``) stand beside them.
            max_turns: replies of the model, at the most; what the last of them calls is not run.
            tool_timeout_s: for one call of a tool that has no deadline of its own (``@tool(timeout_s=...)``).

        Raises:
            GenerationError: no server could finish a reply.
            ContextFull: not even the first reply has room. When a later one has none, what there is is returned.
            WorkflowError: one of ``tools`` cannot be a tool.
            Reject: a tool raised it.
        """
        ...

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Go on from a text or from token ids, without a template."""
        ...


class RewardModel(Protocol):
    """A frozen reward model (``policies.NAME.kind: reward``), which workflows take by its name."""

    async def score(self, messages: Sequence[Message]) -> float:
        """Return how good the last answer of a conversation is, in the model's own units: only differences count.

        The whole conversation is rendered by the reward model's chat template, and scored at its last token.

        Raises:
            GenerationError: no server could score it, or it is too long. Let it pass: it is recorded on the trajectory.
            WorkflowError: the template refuses the conversation.
        """
        ...


Workflow = Callable[[Prompt, Policy], Awaitable[Rewards]]

GroupWorkflow = Callable[[Prompt, Sequence[Policy]], Awaitable[Sequence[Rewards | Reject]]]
"""Sees all siblings of a group at once, and returns what becomes of each, in their order."""

W = TypeVar("W", bound=GroupWorkflow)


def group_workflow(function: W) -> W:
    """Have a workflow called once for a whole group, with a policy for each sibling: for rewards that compare answers.

    It returns one ``Rewards`` for each sibling, in their order; ``Reject("why")`` in the place of one withdraws that
    sibling, and raising it withdraws all. The group is stored whole, in one message, or not at all: a call that is
    cut short is made again from its beginning. An evaluation calls it with a single sibling.
    """
    function._is_group_workflow = True  # type: ignore[attr-defined]
    return function


P = TypeVar("P", bound=Callable[[], AsyncIterator[Any]])


def per_node(function: P) -> P:
    """Have an environment made once on every node, before its first workflow, and ended after its last.

        @per_node
        async def browser() -> AsyncIterator[Browser]:
            async with launch() as one:
                yield one

        async def shop(prompt: Prompt, policy: Policy, browser: Browser) -> float: ...

    A workflow of the same file that has a parameter of its name is given what it yields. ``try`` and ``eval`` make it
    too. A node that starts again makes it anew, and one that is killed has ended it in no way.

    Raises:
        UserError: it is no async function without parameters that yields.
    """
    name = getattr(function, "__name__", repr(function))
    unknown: Any = function  # whose type is not narrowed by the question
    does_yield = inspect.isasyncgenfunction(unknown)
    if not does_yield or inspect.signature(function).parameters:
        got = "parameters" if does_yield else "what yields nothing"
        raise UserError(f"per_node {name}: got {got}, need `async def {name}()` that yields its value once")
    function._is_per_node = True  # type: ignore[attr-defined]
    return function


def is_per_node(value: object) -> TypeGuard[Callable[[], AsyncIterator[Any]]]:
    """Say whether it is something to make once per node."""
    return inspect.isasyncgenfunction(value) and getattr(value, "_is_per_node", False) is True


def is_group_workflow(function: Workflow | GroupWorkflow) -> TypeGuard[GroupWorkflow]:
    """Say whether it sees all siblings at once."""
    return getattr(function, "_is_group_workflow", False) is True
