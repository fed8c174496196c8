"""What a request asks of the policy and what comes back, whatever API it was written in."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint.refusals import Refusal
from areal_async.rollout.policy.messages import assistant_message

Finish = Literal["stop", "stop_sequence", "length", "tool_calls"]
FormKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

MAX_REPLIES = 64
"""To one request."""


class Form(NamedTuple):
    """What an answer has to look like that calls no tool, as ``policy.chat`` takes it."""

    kind: FormKind
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """Which calls an answer may have."""

    is_required: bool = False
    """It has to call, and says nothing else."""
    names: tuple[str, ...] = ()
    """Names of the tools that may be called then, of all that the model is told of; empty for any."""
    is_single: bool = False
    """At most one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """What a request asks for. Messages and tools are written as OpenAI's chat API writes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Overrides, by the names of ``rollout.sampling``; ``max_new_tokens`` is an upper bound, never a wish for more."""
    n: int = 1
    is_streamed: bool = False
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    """So many of the likeliest tokens at each position are told as well."""
    choice: ToolChoice = ToolChoice()
    form: Form | None = None
    prompt: str | list[int] | None = None
    """What is gone on from as it stands, without a chat template, instead of messages."""
    is_counted: bool = False
    """The tokens of its prompt are counted, and nothing is said."""

    @property
    def stop(self) -> Sequence[str]:
        """The strings that the agent wants its answer to end before."""
        stop: Sequence[str] = self.sampling.get("stop", ())
        return stop


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token."""

    text: str
    """The token as it reads alone: half a character reads as a replacement character."""
    logprob: float
    top: Sequence["TokenLogprob"] = ()
    """The likeliest in its place, likeliest first, where they were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedReply:
    """A recorded reply, as an agent is told it."""

    content: str
    """Without the stop string that ended it, which the recorded tokens hold."""
    tool_calls: list[dict[str, Any]]
    """The calls as OpenAI's chat API writes them."""
    finish: Finish
    stop_sequence: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    logprobs: list[TokenLogprob] | None
    """One for every sampled token, the end of turn too; None where they were not asked for."""
    turn: Turn | None = None
    """What was recorded of it."""

    @property
    def message(self) -> dict[str, Any]:
        """Return it as a message of OpenAI's chat API."""
        return assistant_message(self.content, self.tool_calls)


class ApiExchange(ABC):
    """One request, read, and the ways to answer it: whole, or as server-sent events.

    Each method of those returns the bytes to send, possibly none. An exchange is answered once.
    """

    call: CompletionRequest
    id: str
    """What its answer is called by."""
    replies: Sequence["ReportedReply"] = ()
    """What it was answered with, once it was."""
    num_prompt_tokens: int = 0
    """Of one that is counted, once it was."""

    @abstractmethod
    def answer(self, replies: Sequence[ReportedReply]) -> Any:
        """Return the JSON object that answers it whole."""

    def conclude(self, replies: Sequence[ReportedReply]) -> None:  # noqa: B027
        """Note that it has been answered. An API whose requests bring their whole conversation has nothing to note."""

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def piece(self, index: int, text: str) -> bytes:
        """Write a piece of the content of reply ``index``."""

    @abstractmethod
    def end(self, index: int, reply: ReportedReply, rest: str) -> bytes:
        """Write what is left of reply ``index``: ``rest`` of its content, its calls, why it ended."""

    @abstractmethod
    def finish(self, replies: Sequence[ReportedReply]) -> bytes:
        """Write the end of the answer, once every reply has ended."""

    @abstractmethod
    def fail(self, refusal: Refusal) -> bytes:
        """Write that there will be no more."""


def data_event(value: Any) -> bytes:
    """Write a server-sent event that has no name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """Write a server-sent event that is named like its ``type``."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
