"""The policy that a workflow talks to: every call is streamed from a server and recorded token for token.

Invariant: what the model said is never tokenized again. Where a conversation goes on from a recorded
reply, the recorded tokens are the prompt, and only what was added since is tokenized (``conversation``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

from pydantic import ValidationError

from areal_async.api import Act, Message, Reply, RunnableTool, ToolLike, ToolResult
from areal_async.config.policy import TRUNCATION_REMEDY, CallSampling
from areal_async.config.settings import SamplingSettings
from areal_async.errors import ContextFull, WorkflowError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.conversation import Conversations, RenderedPrompt
from areal_async.rollout.policy.generation import Generator, TurnGenerator
from areal_async.rollout.policy.images import has_images
from areal_async.rollout.policy.messages import checked_messages
from areal_async.rollout.policy.offload import beside_if_long, is_long
from areal_async.rollout.policy.replies import ReplyRecord, ReplyRecorder
from areal_async.rollout.policy.sampling import sampling_params
from areal_async.rollout.policy.stream import RecordingStream, TakeTokens
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.tools.parse import ToolFormat
from areal_async.rollout.tools.run import Toolbox
from areal_async.rollout.tools.schema import describe_tool

MAX_REPLIES = 256
"""To one question, asked at once with ``n=``."""
TOOL_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class PolicyRole:
    """What a policy is that speaks beside the first one of a trajectory."""

    name: str
    """The name that the workflow calls it by."""
    trajectory: ReplyRecord
    """The record of the first one."""
    is_trained: bool = True
    """``False`` keeps what it says out of the trajectory, all but ``info``."""


class RecordingPolicy:
    """One trajectory's ``contracts.Policy``, but for its address, which ``endpoint.policy`` gives it."""

    def __init__(
        self,
        generator: Generator,
        codec: TextCodec,
        sampling: SamplingSettings,
        *,
        name: str,
        call_parser: EngineCallParser | None = None,
        role: PolicyRole | None = None,
    ) -> None:
        """Take ``name`` as the beginning of its replies' ids.

        Args:
            call_parser: where the servers' own is to find the tool calls, instead of ours.
            role: of one that speaks beside ``policy``; ``None`` for ``policy`` itself.
        """
        self._call_parser = call_parser
        self._codec = codec
        self.sampling = sampling
        self._name = name
        self._trajectory = role.trajectory if role else ReplyRecord()
        self.record = self._trajectory if role is None or role.is_trained else ReplyRecord()
        """What was said, by its roles too."""
        self._turns = TurnGenerator(generator, self.record)
        self._recorder = ReplyRecorder(
            codec, self.record, name=name, role=role.name if role else "", call_parser=call_parser
        )
        self._conversations = Conversations(codec, self._recorder.recorded)
        self._streams: list[RecordingStream] = []

    @property
    def turns(self) -> list[Turn]:
        """What was said, by its roles too."""
        return self.record.turns

    @property
    def reply_ids(self) -> list[str]:
        """One per turn."""
        return self.record.reply_ids

    @property
    def info(self) -> dict[str, float]:
        """The trajectory's, whichever of its policies is asked."""
        return self._trajectory.info

    @info.setter
    def info(self, info: dict[str, float]) -> None:
        self._trajectory.info = info

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls; ``None`` where only the servers' parser knows."""
        return self._codec.tool_format if self._call_parser is None else None

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
        """Answer a conversation."""
        params = self._sampling_params(sampling)
        if n is not None and not 1 <= n <= MAX_REPLIES:
            raise WorkflowError(f"policy call: got n={n!r}, need 1 to {MAX_REPLIES}, or none for a single reply")
        rendered = await self._rendered_prompt(messages, tools)
        turns = await self._turns.generate(rendered.prompt_ids, params, 1 if n is None else n, images=rendered.images)
        parsed = [await self._recorder.parse(turn, rendered, server=self._turns.server) for turn in turns]
        replies = [self._recorder.record(turn, rendered, found) for turn, found in zip(turns, parsed, strict=True)]
        return replies[0] if n is None else replies

    def stream(
        self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), **sampling: Any
    ) -> RecordingStream:
        """Answer a conversation piece by piece."""
        params = self._sampling_params(sampling)
        messages = checked_messages(messages)
        is_lengthy = has_images(messages) or is_long(messages, tools)
        opened = None if is_lengthy else self._noted(self._opening(messages, tools)())

        async def generate(on_tokens: TakeTokens) -> Reply:
            rendered = opened or await self._rendered_prompt(messages, tools)
            (turn,) = await self._turns.generate(
                rendered.prompt_ids, params, on_tokens=on_tokens, images=rendered.images
            )
            parsed = await self._recorder.parse(turn, rendered, server=self._turns.server)
            return self._recorder.record(turn, rendered, parsed)

        self._streams.append(stream := RecordingStream(generate, self._codec))
        return stream

    async def count_prompt_tokens(self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = ()) -> int:
        """Return how many tokens the prompt of a conversation has, and record nothing."""
        messages = checked_messages(messages)
        if has_images(messages):
            messages = await self._codec.images.taken(messages)
        opening = partial(self._conversations.open, messages, self._schemas(tools))
        return len((await beside_if_long(opening, messages, tools)).prompt_ids)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Go on from a text or from token ids."""
        params = self._sampling_params(sampling)
        ids = await self._encoded(prompt) if isinstance(prompt, str) else list(prompt)
        (turn,) = await self._turns.generate(ids, params)
        return self._recorder.record(turn, None, await self._recorder.parse(turn, None))

    async def act(
        self,
        messages: Sequence[Message],
        tools: Sequence[RunnableTool],
        *,
        max_turns: int = 8,
        tool_timeout_s: float = TOOL_TIMEOUT_S,
        **sampling: Any,
    ) -> Act:
        """Let the model answer a conversation with the help of tools."""
        if max_turns < 1:
            raise WorkflowError(f"policy.act: got max_turns={max_turns}, need at least 1")
        images = self._codec.images
        toolbox = Toolbox(tools, timeout_s=tool_timeout_s, take_image=images.take_part if self._codec.vision else None)
        said = await images.taken(checked_messages(messages))  # here, once for all turns
        replies: list[Reply] = []
        results: list[ToolResult] = []
        record = self.record
        record.num_tool_calls = record.num_tool_calls or 0
        while True:
            try:
                reply = await self.chat(said, tools=toolbox.schemas, **sampling)
            except ContextFull:
                if not replies:
                    raise
                return Act(messages=said, replies=replies, results=results)
            replies.append(reply)
            said.append(reply.message)
            if not reply.tool_calls or len(replies) == max_turns:
                return Act(messages=said, replies=replies, results=results)
            came = await toolbox.run(reply.tool_calls)
            record.num_tool_calls += len(came)
            record.num_tool_errors += sum(result.is_error for result in came)
            results += came
            said += [result.message for result in came]

    def close(self) -> None:
        """End what the workflow has left running; what it calls from now on is refused, and nothing is recorded."""
        self._recorder.is_closed = True
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()  # each knows this policy: left in a circle, all that they hold waits for the collector

    async def _rendered_prompt(self, messages: Sequence[Message], tools: Sequence[ToolLike]) -> RenderedPrompt:
        messages = checked_messages(messages)
        if has_images(messages):
            messages = await self._codec.images.taken(messages)
        return self._noted(await beside_if_long(self._opening(messages, tools), messages, tools))

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolLike]) -> Callable[[], RenderedPrompt]:
        return partial(self._conversations.open, messages, self._schemas(tools), rooms=self._turns.rooms())

    def _noted(self, rendered: RenderedPrompt) -> RenderedPrompt:
        self.record.num_breaks += rendered.is_break
        return rendered

    def _schemas(self, tools: Sequence[ToolLike]) -> list[Mapping[str, Any]]:
        schemas = [tool if isinstance(tool, Mapping) else describe_tool(tool).schema for tool in tools]
        if schemas and self.tool_format == "unknown":
            raise WorkflowError(
                "policy call: got tools for a model whose chat template has it write calls in a way that is not known "
                "here; name SGLang's parser for them, inference.tool_call_parser"
            )
        return schemas

    async def _encoded(self, prompt: str) -> list[int]:
        for room in self._turns.rooms():
            room.check_length(prompt)
        return await beside_if_long(partial(self._codec.encode, prompt, add_special_tokens=True), prompt)

    def _sampling_params(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        self._recorder.check_open()
        sampling = self.sampling
        if overrides:
            try:
                sampling = CallSampling.model_validate({**sampling.model_dump(), **overrides})
            except ValidationError as exc:
                problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in exc.errors())
                names = ", ".join(CallSampling.model_fields)
                raise WorkflowError(f"policy call: got bad sampling ({problems}), need any of {names}") from exc
        if self.record.refuses_truncation and sampling.truncation:
            raise WorkflowError(f"policy call: got {sampling.truncation}; {TRUNCATION_REMEDY}")
        return sampling_params(sampling, self._codec.stop_token_ids)
