"""From a turn to a reply: what the model said is read, recorded token for token, and can be gone on from."""

from dataclasses import dataclass, field

import msgspec

from areal_async.api import Reply, ToolCall
from areal_async.errors import WorkflowError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.inference.pool import ServerHandle, SiblingGroup
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.conversation import RecordedReply, RenderedPrompt
from areal_async.rollout.policy.messages import reply_message
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.tools.parse import Parsed, parse_reply, read_found, split_thought
from areal_async.rollout.user_code.task_scope import unscoped
from areal_async.vision.images import Image


@dataclass
class ReplyRecord:
    """What policies have said in one trajectory."""

    turns: list[Turn] = field(default_factory=list)
    reply_ids: list[str] = field(default_factory=list)
    """One per turn."""
    images: dict[str, Image] = field(default_factory=dict)
    """SHA-256 -> each image in a prompt of ``turns``, once, however often it was shown (``Turn.images``)."""
    info: dict[str, float] = field(default_factory=dict)
    num_breaks: int = 0
    """Calls that went on from something recorded and could not keep its tokens as their beginning."""
    num_tool_calls: int | None = None
    """Calls that ``act`` was asked to run, good ones and bad ones; None where no model was given tools to act."""
    num_tool_errors: int = 0
    max_sequence_tokens: int | None = None
    """What a trainer can pack: no answer goes beyond it. None where nothing is trained."""
    refuses_truncation: bool = False
    """Its tokens are trained, and nobody has accepted the bias of those that were cut away."""
    siblings: SiblingGroup | None = None
    """The group whose requests its own are; None where it has no siblings."""


class ReplyRecorder:
    """Reads and records what one policy says."""

    def __init__(
        self, codec: TextCodec, record: ReplyRecord, *, name: str, role: str, call_parser: EngineCallParser | None
    ) -> None:
        """Take ``name`` as the beginning of the replies' ids, and ``role``, empty for the first policy."""
        self.recorded: list[RecordedReply] = []
        """Replies that ended a conversation."""
        self.is_closed = False
        self._codec = codec
        self._record = record
        self._name = name
        self._role = role
        self._call_parser = call_parser
        self._num_calls_written = 0
        self._written_ids: set[str] = set()

    async def parse(self, turn: Turn, rendered: RenderedPrompt | None, *, server: ServerHandle | None = None) -> Parsed:
        """Take a reply apart where the model was given tools; ``server`` is the one to ask, where one is asked."""
        if rendered is None or self._is_plain(rendered):
            return Parsed(self._codec.decode(turn.output_ids), [])
        written = self._codec.decode_reply(turn.output_ids)
        if self._call_parser is None:
            return parse_reply(written, self._codec.tool_format, rendered.tools, is_thinking=rendered.is_thinking)
        thought, said = split_thought(written, is_thinking=rendered.is_thinking)
        with unscoped():
            found = await self._call_parser.find(said, rendered.tools, preferred=server)
        return Parsed(thought + found.normal_text, [read_found(call.name, call.parameters) for call in found.calls])

    def record(self, turn: Turn, rendered: RenderedPrompt | None, parsed: Parsed) -> Reply:
        """Keep a turn; one that ended a conversation can be gone on from."""
        self.check_open()
        if self._role:  # in place, before anybody else has it: who timed the call knows the turn by its identity
            msgspec.structs.force_setattr(turn, "role", self._role)
        self._record.turns.append(turn)
        if rendered is not None:
            self._record.images |= {image.sha256: image for image in rendered.images}
        reply_id = f"{self._name}.{len(self._record.turns)}"
        self._record.reply_ids.append(reply_id)
        text = parsed.content if rendered is None or self._is_plain(rendered) else self._codec.decode(turn.output_ids)
        calls = [
            ToolCall(id=self._next_call_id(call.id), name=call.name, arguments=call.arguments, error=call.error)
            for call in parsed.calls
        ]
        is_told_apart = self._has_channels and rendered is not None  # its template takes no message that has channels
        told = parsed.content if is_told_apart else text
        message = reply_message(told, parsed.content, calls)
        if rendered is not None:
            said = [*rendered.messages, reply_message(told, parsed.content, calls)]  # the workflow may change its own
            self.recorded.append(RecordedReply(messages=said, message=message, tools=rendered.tools, turn=turn))
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

    def check_open(self) -> None:
        """Refuse what comes after the end of the trajectory.

        Raises:
            WorkflowError: it has ended.
        """
        if self.is_closed:
            raise WorkflowError("policy call: got one after the end of its trajectory; await what the workflow starts")

    def _is_plain(self, rendered: RenderedPrompt) -> bool:
        """Say whether a reply is no more than its text."""
        return not (rendered.tools or self._has_channels)

    @property
    def _has_channels(self) -> bool:
        """What is said to the reader is a part of what the model writes, with tools and without."""
        return self._call_parser is None and self._codec.tool_format == "harmony"

    def _next_call_id(self, written: str) -> str:
        """Return the model's own id of a call, once; else nine letters and digits, as the strictest templates want."""
        if written and written not in self._written_ids:
            self._written_ids.add(written)
            return written
        self._num_calls_written += 1
        return f"call{self._num_calls_written:05d}"
