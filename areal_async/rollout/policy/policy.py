"""The policy that a workflow talks to: every call is streamed from a server and recorded token for token.

Invariant: what the model said is never tokenized again. Where a conversation goes on from a recorded
reply, the recorded tokens are the prompt, and only what was added since is tokenized (``conversation``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, overload

import anyio
import msgspec
from pydantic import ValidationError

from areal_async.api import Act, Message, Reply, RunnableTool, ToolCall, ToolLike, ToolResult
from areal_async.config.policy import CallSampling
from areal_async.config.settings import SamplingSettings
from areal_async.errors import ContextFull, WorkflowError
from areal_async.inference.call_parser import FoundCalls
from areal_async.inference.pool import ServerHandle
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.conversation import Conversations, RenderedPrompt
from areal_async.rollout.policy.messages import checked_messages, reply_message
from areal_async.rollout.policy.offload import beside_if_long, is_long
from areal_async.rollout.policy.sampling import sampling_params
from areal_async.rollout.policy.stream import RecordingStream
from areal_async.rollout.policy.text import ContextRoom, TextCodec
from areal_async.rollout.tools.parse import Parsed, ToolFormat, parse_reply, read_found, split_thought
from areal_async.rollout.tools.run import Toolbox
from areal_async.rollout.tools.schema import describe_tool
from areal_async.rollout.user_code.task_scope import unscoped

MAX_REPLIES = 256
"""To one question, asked at once with ``n=``."""
TOOL_TIMEOUT_S = 30.0


class Generator(Protocol):
    """What a policy needs of the inference client."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> tuple[Turn, ServerHandle]: ...


@dataclass
class ReplyRecord:
    """What policies have said in one trajectory."""

    turns: list[Turn] = field(default_factory=list)
    reply_ids: list[str] = field(default_factory=list)
    """One per turn."""
    info: dict[str, float] = field(default_factory=dict)
    num_breaks: int = 0
    """Calls that went on from something recorded and could not keep its tokens as their beginning."""
    num_tool_calls: int | None = None
    """Calls that ``act`` was asked to run, good ones and bad ones; None where no model was given tools to act."""
    num_tool_errors: int = 0
    max_sequence_tokens: int | None = None
    """What a trainer can pack: no answer goes beyond it. None where nothing is trained."""


@dataclass(frozen=True, kw_only=True)
class PolicyRole:
    """What a policy is that speaks beside the first one of a trajectory."""

    name: str
    """The name that the workflow calls it by."""
    trajectory: ReplyRecord
    """The record of the first one."""
    is_trained: bool = True
    """``False`` keeps what it says out of the trajectory, all but ``info``."""


class CallParser(Protocol):
    """What a policy needs of the servers' own parser of tool calls."""

    async def find(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, preferred: ServerHandle | None = None
    ) -> FoundCalls: ...


class RecordingPolicy:
    """One trajectory's ``contracts.Policy``."""

    def __init__(
        self,
        generator: Generator,
        codec: TextCodec,
        sampling: SamplingSettings,
        *,
        name: str,
        call_parser: CallParser | None = None,
        role: PolicyRole | None = None,
    ) -> None:
        """Take ``name`` as the beginning of its replies' ids.

        Args:
            call_parser: where the servers' own is to find the tool calls, instead of ours.
            role: of one that speaks beside ``policy``; ``None`` for ``policy`` itself.
        """
        self._generator = generator
        self._call_parser = call_parser
        self._codec = codec
        self.sampling = sampling
        self._name = name
        self._role = role.name if role else ""
        self._trajectory = role.trajectory if role else ReplyRecord()
        self.record = self._trajectory if role is None or role.is_trained else ReplyRecord()
        """What was said, by its roles too."""
        self._server: ServerHandle | None = None
        self._conversations = Conversations(codec)
        self._streams: list[RecordingStream] = []
        self._num_calls_written = 0
        self._is_closed = False

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

    @property
    def base_url(self) -> str:
        """A policy has an address on a node (``endpoint``)."""
        raise WorkflowError("policy.base_url: got a policy without an endpoint, need one on a node")

    @property
    def api_key(self) -> str:
        """As ``base_url``."""
        raise WorkflowError("policy.api_key: got a policy without an endpoint, need one on a node")

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
        turns = await self._generate(rendered.prompt_ids, params, 1 if n is None else n)
        parsed = [await self._parse(turn, rendered) for turn in turns]
        replies = [self._record(turn, rendered, found) for turn, found in zip(turns, parsed, strict=True)]
        return replies[0] if n is None else replies

    def stream(
        self, messages: Sequence[Message], *, tools: Sequence[ToolLike] = (), **sampling: Any
    ) -> RecordingStream:
        """Answer a conversation piece by piece."""
        params = self._sampling_params(sampling)
        opened = None if is_long(messages, tools) else self._noted(self._opening(messages, tools)())

        async def generate(on_tokens: Callable[[list[int]], None]) -> Reply:
            rendered = opened or await self._rendered_prompt(messages, tools)
            fitting = self._fitted(params, rendered.prompt_ids)
            with unscoped():
                turn, self._server = await self._generator.generate(
                    rendered.prompt_ids, fitting, preferred=self._server, on_tokens=on_tokens
                )
            return self._record(turn, rendered, await self._parse(turn, rendered))

        self._streams.append(stream := RecordingStream(generate, self._codec))
        return stream

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Go on from a text or from token ids."""
        params = self._sampling_params(sampling)
        ids = await self._encoded(prompt) if isinstance(prompt, str) else list(prompt)
        (turn,) = await self._generate(ids, params, 1)
        return self._record(turn, None, await self._parse(turn, None))

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
        toolbox = Toolbox(tools, timeout_s=tool_timeout_s)
        said = checked_messages(messages)
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
        self._is_closed = True
        for stream in self._streams:
            stream.cancel()

    async def _rendered_prompt(self, messages: Sequence[Message], tools: Sequence[ToolLike]) -> RenderedPrompt:
        return self._noted(await beside_if_long(self._opening(messages, tools), messages, tools))

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolLike]) -> Callable[[], RenderedPrompt]:
        return partial(self._conversations.open, messages, self._schemas(tools), rooms=self._rooms())

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
        for room in self._rooms():
            room.check_length(prompt)
        return await beside_if_long(partial(self._codec.encode, prompt, add_special_tokens=True), prompt)

    def _rooms(self) -> list[ContextRoom]:
        """Return what is known of the room for a prompt: a trainer's packed row, and a server that was met."""
        row = self.record.max_sequence_tokens
        rooms = [] if row is None else [ContextRoom(row, "trainer.token_budget")]
        if self._server is not None and self._server.context_tokens is not None:
            rooms.append(ContextRoom(self._server.context_tokens, "inference.context_length or the model's"))
        return rooms

    async def _generate(self, prompt_ids: list[int], params: Mapping[str, Any], num_turns: int) -> list[Turn]:
        """Return ``num_turns`` completions of one prompt, generated side by side."""
        params = self._fitted(params, prompt_ids)
        turns: dict[int, Turn] = {}
        preferred = self._server

        async def generate_one(number: int) -> None:
            own = params
            if number and "sampling_seed" in params:  # else all would be the same
                own = {**params, "sampling_seed": params["sampling_seed"] + number}
            with unscoped():
                turns[number], self._server = await self._generator.generate(prompt_ids, own, preferred=preferred)

        if num_turns == 1:
            await generate_one(0)
        else:
            async with anyio.create_task_group() as generating:
                for number in range(num_turns):
                    generating.start_soon(generate_one, number)
        return [turns[number] for number in range(num_turns)]

    def _fitted(self, params: Mapping[str, Any], prompt_ids: Sequence[int]) -> Mapping[str, Any]:
        """Ask for no longer an answer than fits a packed row behind this prompt; servers have bounds of their own.

        Raises:
            ContextFull: not a token of it would fit. No server has spent anything on it.
        """
        most = self.record.max_sequence_tokens
        if most is None:
            return params
        if len(prompt_ids) >= most:
            raise ContextFull(len(prompt_ids), most, "trainer.token_budget")
        return {**params, "max_new_tokens": min(params["max_new_tokens"], most - len(prompt_ids))}

    async def _parse(self, turn: Turn, rendered: RenderedPrompt | None) -> Parsed:
        """Take a reply apart where the model was given tools."""
        if rendered is None or not rendered.tools:
            return Parsed(self._codec.decode(turn.output_ids), [])
        written = self._codec.decode_reply(turn.output_ids)
        if self._call_parser is None:
            return parse_reply(written, self._codec.tool_format, rendered.tools, is_thinking=rendered.is_thinking)
        thought, said = split_thought(written, is_thinking=rendered.is_thinking)
        with unscoped():
            found = await self._call_parser.find(said, rendered.tools, preferred=self._server)
        return Parsed(thought + found.normal_text, [read_found(call.name, call.parameters) for call in found.calls])

    def _record(self, turn: Turn, rendered: RenderedPrompt | None, parsed: Parsed) -> Reply:
        """Keep a turn; one that ended a conversation can be gone on from."""
        self._check_open()
        if self._role:  # in place, before anybody else has it: who timed the call knows the turn by its identity
            msgspec.structs.force_setattr(turn, "role", self._role)
        self.turns.append(turn)
        reply_id = f"{self._name}.{len(self.turns)}"
        self.reply_ids.append(reply_id)
        text = self._codec.decode(turn.output_ids)
        calls = [
            ToolCall(id=self._next_call_id(), name=call.name, arguments=call.arguments, error=call.error)
            for call in parsed.calls
        ]
        message = reply_message(text, parsed.content, calls)
        if rendered is not None:
            self._conversations.record(rendered, message, turn)
        return Reply(
            id=reply_id,
            text=text,
            message=message,
            token_ids=list(turn.output_ids),  # the workflow's own: what it does to them is not trained
            logprobs=list(turn.logprobs),
            finish_reason=turn.finish_reason,
            tool_calls=calls,
            top_logprobs=turn.top_logprobs,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkflowError("policy call: got one after the end of its trajectory; await what the workflow starts")

    def _next_call_id(self) -> str:
        """Return nine letters and digits, which is what the strictest templates take."""
        self._num_calls_written += 1
        return f"call{self._num_calls_written:05d}"

    def _sampling_params(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        self._check_open()
        sampling = self.sampling
        if overrides:
            try:
                sampling = CallSampling.model_validate({**sampling.model_dump(), **overrides})
            except ValidationError as exc:
                problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in exc.errors())
                names = ", ".join(CallSampling.model_fields)
                raise WorkflowError(f"policy call: got bad sampling ({problems}), need any of {names}") from exc
        return sampling_params(sampling, self._codec.stop_token_ids)
