"""From a conversation to the tokens of a prompt: what the model said keeps the tokens it was said with.

A workflow holds messages; the model's own among them are known by the recorded reply. Where a conversation goes on
from one, the prompt is the recorded tokens and whatever the chat template writes after them. Whether the template
still stands by what it wrote is asked of the template itself: it *breaks* the prefix when it writes the conversation
up to the reply otherwise now than it did when the reply was the last message (the reasoning of earlier turns is left
out, a system message moves). How it spells the reply does not matter, since the recorded tokens stand for that.

After a break the prompt starts anew, and even there the text of a reply that is left keeps its own tokens. Invariant:
the text of every prompt is what the template writes, with each recorded reply as it was said.

The template writes one placeholder for each image, and a prompt has one for each of its tokens. Which image that is no
text says: messages are compared with what their images hold.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from areal_async.api import Message
from areal_async.errors import WorkflowError
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.images import images_of, texts_in
from areal_async.rollout.policy.messages import are_same, assistant_message, checked_messages, is_same
from areal_async.rollout.policy.text import ContextRoom, TextCodec
from areal_async.rollout.tools.parse import is_in_thought
from areal_async.vision.images import Image

_MARK = "\ue0a7{}\ue0a8"
"""Stands for a reply while its place in the text is looked for. Private characters: no text holds them by accident."""

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A reply, and the conversation that it ended."""

    messages: list[Message]
    """A copy, up to and with the reply: the workflow may change its own."""
    message: Message
    """The very object that the workflow was given."""
    tools: list[Mapping[str, Any]]
    """A copy too, which all replies of one conversation share."""
    turn: Turn

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Say whether ``messages`` begin with this conversation."""
        return self._begins(messages, self.is_reply)

    def is_reply(self, message: Message) -> bool:
        """Say whether ``message`` is the reply, as it was given or in a copy; changed, it is the workflow's own."""
        return is_same(message, self.messages[-1])

    def is_answered_otherwise(self, messages: Sequence[Message]) -> bool:
        """Say whether ``messages`` begin with the same question and another answer."""
        return self._begins(messages, lambda answer: answer.get("role") == "assistant")

    def _begins(self, messages: Sequence[Message], is_answer: Callable[[Message], bool]) -> bool:
        """Say whether ``messages`` begin with the same question and such an answer."""
        num_before = len(self.messages) - 1
        return (
            num_before < len(messages)
            and is_answer(messages[num_before])
            and are_same(messages[:num_before], self.messages[:-1])
        )


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Where the model answers."""

    messages: list[Message]
    tools: list[Mapping[str, Any]]
    prompt_ids: list[int]
    """Expanded."""
    images: list[Image]
    """In the order of their tokens."""
    is_break: bool
    """It goes on from something recorded, whose tokens it could not keep as its beginning."""
    is_thinking: bool
    """The template has begun a thought, which the model goes on with."""


class Conversations:
    """All conversations of one trajectory."""

    def __init__(self, codec: TextCodec, recorded: Sequence[RecordedReply]) -> None:
        """``recorded``: what may be gone on from; it grows."""
        self._codec = codec
        self._recorded = recorded

    def open(
        self, messages: Sequence[Message], tools: Schemas = (), *, rooms: Sequence[ContextRoom] = ()
    ) -> RenderedPrompt:
        """Return the prompt for a conversation, whose images have been taken in (``ImageIntake``).

        Raises:
            ContextFull: it has more characters than could fit into one of ``rooms``.
            WorkflowError: it is none, the chat template refuses it, or it has a placeholder that is no image's.
        """
        messages, tools = checked_messages(messages), list(tools)
        self._codec.check_placeholders(messages, tools)
        self._codec.check_roles(messages, tools)
        render = self._codec.render if self._recorded else self._codec.render_beginning
        text = render(messages, tools)
        for room in rooms:
            room.check_length(text)
        base, body = self._base(messages, tools, text)
        seen = base.messages if base else []
        start = len(seen)
        replies = self._replies(messages, start)
        images = images_of(messages)
        added = self._tokens(messages, tools, text, body, replies)
        added = self._codec.expand(added, images[len(images_of(seen)) :])
        prompt_ids = self._go_on(base.turn, added) if base else added
        # What was changed may be nothing to the template (it trims): then the tokens are kept all the same.
        is_kept = bool(replies) and _begins_with(prompt_ids, images, replies[max(replies)].turn)
        is_break = (bool(replies) and not is_kept) or any(
            recorded.is_answered_otherwise(messages) for recorded in self._recorded if len(recorded.messages) > start
        )
        return RenderedPrompt(
            messages=[*seen, *deepcopy(messages[start:])],
            tools=base.tools if base else deepcopy(tools),
            prompt_ids=prompt_ids,
            images=images,
            is_break=is_break,
            is_thinking=is_in_thought(text),
        )

    def _base(self, messages: list[Message], tools: Schemas, text: str) -> tuple[RecordedReply | None, str]:
        """Return the longest recorded conversation that goes on here, and the part of ``text`` it stands for."""
        candidates = [one for one in reversed(self._recorded) if len(one.messages) <= len(messages)]
        candidates.sort(
            key=lambda one: (len(one.messages), messages[len(one.messages) - 1] is one.message), reverse=True
        )
        for recorded in candidates:
            if recorded.tools == tools and recorded.is_continued_by(messages):
                body = self._body(messages[: len(recorded.messages)], tools)
                if body is not None and text.startswith(body):
                    return recorded, body
        return None, ""

    def _body(self, messages: list[Message], tools: Schemas) -> str | None:
        """Return what the template writes up to the end of the last message's content; None where it will not say."""
        mark = _MARK.format("")
        try:
            written = self._codec.render(messages, tools, for_reply=False)
            if (body := self._usual_body(written, messages[-1])) is not None:
                return body
            marked = self._codec.render([*messages[:-1], assistant_message(mark)], tools, for_reply=False)
        except WorkflowError:
            return None
        _, found, closing = marked.rpartition(mark)
        closings = (
            closing,
            *self._codec.turn_ends,
        )  # gpt-oss has one token for the end of a call and another for a text
        end = next((one for one in closings if written.endswith(one)), None)
        if not found or end is None:
            return None
        if self._codec.is_end_of_turn(closing):
            self._codec.usual_closing = closing
        return written[: len(written) - len(end)]

    def _usual_body(self, written: str, reply: Message) -> str | None:
        """Return ``_body`` where it follows from how the template has closed another reply; None where it does not.

        It does where the usual closing stands at the end, which begins with the one end of turn that there is behind
        a content: what the model said, it said before that. A reply of nothing may have no end of its own, and be
        followed by the end of another message.
        """
        body = written.removesuffix(self._codec.usual_closing)
        is_closed = len(body) < len(written) and not body.rstrip().endswith(tuple(self._codec.turn_ends))
        says_something = any(map(str.strip, texts_in([reply.get("content"), reply.get("tool_calls")])))
        return body if is_closed and says_something else None

    def _go_on(self, turn: Turn, added: list[int]) -> list[int]:
        said = turn.output_ids
        if added and self._codec.ends_turn(said) and said[-1] == added[0]:
            added = added[1:]  # the template writes the end of turn that the model has said already
        return turn.prompt_ids + said + added

    def _replies(self, messages: list[Message], start: int) -> dict[int, RecordedReply]:
        """Return the recorded replies among ``messages[start:]``, by position."""
        return {
            index: recorded
            for index in range(start, len(messages))
            if messages[index].get("role") == "assistant" and (recorded := self._find(messages, index))
        }

    def _find(self, messages: list[Message], index: int) -> RecordedReply | None:
        """Return the reply that stands at ``index``: the very object, else what was said there, else said anywhere."""
        found = [recorded for recorded in self._recorded if recorded.is_reply(messages[index])]
        return max(
            found,
            key=lambda one: (one.message is messages[index], one.is_continued_by(messages[: index + 1])),
            default=None,
        )

    def _tokens(
        self, messages: list[Message], tools: Schemas, text: str, body: str, replies: dict[int, RecordedReply]
    ) -> list[int]:
        """Tokenize what follows ``body``, with the recorded replies in it as they were said."""
        spliced = self._splice(messages, tools, body, replies) if replies else None
        return self._codec.encode(text[len(body) :]) if spliced is None else spliced

    def _splice(
        self, messages: list[Message], tools: Schemas, body: str, replies: dict[int, RecordedReply]
    ) -> list[int] | None:
        """Find each reply's place by writing a mark there instead; None where the template lets no mark through."""
        marks = {index: _MARK.format(index) for index in replies}
        as_said = {index: self._codec.decode_reply(recorded.turn.output_ids) for index, recorded in replies.items()}
        try:
            text = self._codec.render(_with_contents(messages, as_said), tools)
            rest = self._codec.render(_with_contents(messages, marks), tools)
        except WorkflowError:
            return None
        if not text.startswith(body) or not rest.startswith(body):
            return None
        frame: list[str] = []
        for mark in marks.values():
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            frame.append(before)
        frame = [*frame, rest]
        frame[0] = frame[0][len(body) :]
        return self._fill(text[len(body) :], frame, [recorded.turn for recorded in replies.values()])

    def _fill(self, text: str, frame: list[str], turns: list[Turn]) -> list[int] | None:
        """Tokenize ``text``, in which what stands between two pieces of ``frame`` was said in a turn."""
        if not text.startswith(frame[0]):
            return None
        token_ids: list[int] = []
        plain, position = frame[0], len(frame[0])
        for number, (turn, piece) in enumerate(zip(turns, frame[1:], strict=True), start=1):
            end = len(text) - len(piece) if number == len(turns) else text.find(piece, position)
            if end < position or not text.startswith(piece, end):
                return None
            before, kept, after = self._kept(text[position:end], turn)
            token_ids += self._codec.encode(plain + before) + kept
            plain, position = after + piece, end + len(piece)
        return token_ids + self._codec.encode(plain)

    def _kept(self, written: str, turn: Turn) -> tuple[str, list[int], str]:
        """Return the tokens of a turn that ``written`` holds whole, and the text around them."""
        said, ids = self._codec.decode_reply(turn.output_ids), turn.output_ids
        num_ids = len(ids) - self._codec.ends_turn(ids)
        if written == said:
            return "", ids[:num_ids], ""
        start = said.rfind(written)
        if start < 0:
            return written, [], ""
        end = start + len(written)

        def num_characters(num_tokens: int) -> int:
            return len(self._codec.decode(ids[:num_tokens], skip_special_tokens=False))

        first = bisect_left(range(num_ids), start, key=num_characters)
        last = bisect_right(range(num_ids + 1), end, key=num_characters) - 1
        if last <= first:
            return written, [], ""
        kept = ids[first:last]
        before, after = said[start : num_characters(first)], said[num_characters(last) : end]
        if before + self._codec.decode(kept, skip_special_tokens=False) + after != written:
            return written, [], ""  # a character is spread over tokens on both sides of an edge
        return before, kept, after


def _begins_with(prompt_ids: list[int], images: Sequence[Image], turn: Turn) -> bool:
    said, shown = turn.prompt_ids + turn.output_ids, [image.sha256 for image in turn.images]
    return prompt_ids[: len(said)] == said and [image.sha256 for image in images[: len(shown)]] == shown


def _with_contents(messages: Sequence[Message], contents: Mapping[int, str]) -> list[Message]:
    return [assistant_message(contents[index]) if index in contents else one for index, one in enumerate(messages)]
