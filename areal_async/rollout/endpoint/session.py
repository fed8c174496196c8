"""One trajectory at the endpoint: its key, its running requests, and what became of them.

A request is a call of the policy and nothing more, made in the name of its workflow (its waits, its log fields). What
it says is recorded by the policy; what an agent is told of it is remembered here, to be known when it comes back.
Invariant: after ``close`` no request generates, and nothing is recorded any more.
"""

import asyncio
import contextvars
import hmac
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from areal_async.api import Reply, ReplyStream
from areal_async.errors import ContextFull, GenerationError, RolloutError, WorkflowError
from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.rollout.endpoint.calls import (
    ApiExchange,
    CompletionRequest,
    Finish,
    ReportedReply,
    TokenLogprob,
)
from areal_async.rollout.endpoint.forms import grammar_of
from areal_async.rollout.endpoint.memory import Memory, Recalled
from areal_async.rollout.endpoint.openai_responses import History
from areal_async.rollout.endpoint.reading import Unsupported
from areal_async.rollout.endpoint.refusals import Refusal, RefusalKind
from areal_async.rollout.endpoint.stream_holdback import StreamHoldback
from areal_async.rollout.policy.offload import beside_if_long
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.tools.parse import THOUGHT_TAG
from areal_async.rollout.user_code.boundary import attributed_to, forget_frames
from areal_async.rollout.user_code.task_scope import mark_retrieved

_KEY_BYTES = 32
_NOBODYS_KEY = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"

log = structlog.get_logger()


class Session:
    """What the endpoint knows of one trajectory."""

    def __init__(
        self, policy: RecordingPolicy, codec: TextCodec, *, limits: AdmissionLimits, unsupported: Unsupported
    ) -> None:
        """Take the run's own bound on a reply: agents ask for less than it, or get it.

        Args:
            unsupported: what becomes of fields that cannot be had.
        """
        self.id = secrets.token_hex(8)
        self.key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
        self.model = codec.model
        """What it is called where an agent asks."""
        self.history: History = {}
        self.unsupported = unsupported
        self.failure: RolloutError | None = None
        """The error of the last request, where it failed; one that is answered after it makes it good."""
        self._policy = policy
        self._codec = codec
        self._max_new_tokens = policy.sampling.max_new_tokens
        self._memory = Memory()
        self._context = contextvars.copy_context()
        self._max_admitted = limits.max_admitted
        self._tasks: set[asyncio.Task[None]] = set()
        self.running = asyncio.Semaphore(limits.max_running)
        """To be had by a request while it is answered."""
        self.is_closed = False
        """Its key is good for nothing any more."""

    @property
    def num_admitted(self) -> int:
        """Requests that are answered, or wait for it."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a request in the name of the workflow.

        Raises:
            Refusal: too many run or wait already, or the trajectory has ended.
        """
        if self.is_closed or self.num_admitted >= self._max_admitted:
            work.close()
            if self.is_closed:
                raise ended()
            with self.noting_refusal():
                raise Refusal(
                    "busy", f"requests: {self.num_admitted} of this trajectory wait already; ask less at once"
                )
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """End the key, and cancel what still runs."""
        self.is_closed = True
        for task in self._tasks:
            task.cancel()

    @contextmanager
    def noting_refusal(self) -> Iterator[None]:
        """Note a request that is refused before the policy hears of it: its agent was denied an answer as well."""
        try:
            yield
        except Refusal as refusal:
            self.failure = WorkflowError(f"endpoint: refused a request of the agent: {refusal.message}")
            raise

    async def answer(self, exchange: ApiExchange) -> list[ReportedReply]:
        """Answer a request whole.

        Raises:
            Refusal: it failed.
        """
        call = exchange.call
        if call.is_counted:
            exchange.num_prompt_tokens = await self._count(call)
            return []
        with self._answering():
            if call.prompt is None:
                messages, key = await self._recall(call)
                replies = await self._policy.chat(messages, tools=call.tools, n=call.n, **self._sampling(call))
            else:
                key, sampling = None, self._sampling(call)
                replies = [await self._policy.complete(call.prompt, **sampling) for _ in range(call.n)]
            reported = [self._take(call, key, reply) for reply in replies]
            exchange.replies = reported
            exchange.conclude(reported)
            return reported

    async def stream(self, exchange: ApiExchange) -> AsyncGenerator[bytes, None]:
        """Answer a request as server-sent events. Nothing comes before something is said.

        Raises:
            Refusal: it failed before anything was said.
        """
        call = exchange.call
        if call.prompt is not None:  # the policy says no text without a template piece by piece
            reported = await self.answer(exchange)
            said = b"".join(exchange.end(index, one, one.content) for index, one in enumerate(reported))
            yield exchange.begin() + said + exchange.finish(reported)
            return
        writing: list[asyncio.Task[ReportedReply]] = []
        beginning = exchange.begin()
        try:
            with self._answering():
                messages, key = await self._recall(call)
                ready: asyncio.Queue[bytes | asyncio.Task[ReportedReply]] = asyncio.Queue()
                for index in range(call.n):
                    stream = self._policy.stream(messages, tools=call.tools, **self._sampling(call))
                    task = asyncio.create_task(self._write(exchange, key, index, stream, ready.put_nowait))
                    task.add_done_callback(mark_retrieved)
                    task.add_done_callback(ready.put_nowait)
                    writing.append(task)
                num_left = call.n
                while num_left:
                    one = await ready.get()
                    if isinstance(one, bytes):
                        yield beginning + one
                        beginning = b""
                    else:
                        one.result()
                        num_left -= 1
        except Refusal as refusal:
            if beginning:
                raise
            forget_frames(refusal)
            yield exchange.fail(refusal)
            return
        finally:
            for task in writing:
                task.cancel()
        reported = [task.result() for task in writing]
        exchange.replies = reported
        exchange.conclude(reported)
        yield exchange.finish(reported)

    async def _write(
        self, exchange: ApiExchange, key: bytes, index: int, stream: ReplyStream, put: Callable[[bytes], None]
    ) -> ReportedReply:
        """Write one reply while it is said; one that is cancelled before it is whole is not recorded."""
        holdback = self._holdback_for(exchange.call)
        async with stream:
            async for piece in stream:
                if told := holdback.push(piece):
                    put(exchange.piece(index, told))
            reported = self._take(exchange.call, key, stream.reply)
        put(exchange.end(index, reported, holdback.rest(reported.content)))
        return reported

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Note what becomes of a request, as the policy would have the workflow know it."""
        try:
            with self.noting_refusal(), attributed_to(RolloutError, "endpoint"):
                yield
        except RolloutError as exc:
            self.failure = exc
            log.info("endpoint.failed", cause=str(exc))
            raise Refusal(_kind_of(exc), str(exc)) from exc
        self.failure = None

    async def _count(self, call: CompletionRequest) -> int:
        """Return how many tokens a prompt has. Nothing is denied the agent that it is trained for, nor made good."""
        try:
            with attributed_to(RolloutError, "endpoint"):
                messages, _ = await self._recall(call)
                return await self._policy.count_prompt_tokens(messages, tools=call.tools)
        except RolloutError as exc:
            raise Refusal(_kind_of(exc), str(exc)) from exc

    async def _recall(self, call: CompletionRequest) -> Recalled:
        return await beside_if_long(partial(self._memory.recall, call.messages), call.messages)

    def _sampling(self, call: CompletionRequest) -> dict[str, Any]:
        wanted = call.sampling.get("max_new_tokens", self._max_new_tokens)
        more = {"top_logprobs": call.num_top_logprobs} if call.num_top_logprobs else {}
        return {
            **call.sampling,
            **more,
            **self._grammar(call),
            "max_new_tokens": min(wanted, self._max_new_tokens),
        }

    def _grammar(self, call: CompletionRequest) -> dict[str, Any]:
        if call.prompt is not None:  # no template has begun anything
            return grammar_of(call, None, is_thinking=False)
        return grammar_of(call, self._policy.tool_format, is_thinking=self._codec.begins_thought)

    def _holdback_for(self, call: CompletionRequest) -> StreamHoldback:
        holds_thought = call.form is not None and self._codec.begins_thought
        tool_format = self._policy.tool_format if call.tools else None
        is_blind = tool_format != "json" and (tool_format is None or not self._codec.shows_tags)
        has_channels = self._policy.tool_format == "harmony"  # told are the last ones, with tools and without
        holds_all = holds_thought or has_channels or (bool(call.tools) and is_blind)
        return StreamHoldback(tool_format=tool_format, stop=call.stop, holds_all=holds_all)

    def _take(self, call: CompletionRequest, key: bytes | None, reply: Reply) -> ReportedReply:
        """Return what the agent is told of a reply, and remember it as one to the conversation of ``key``, if any."""
        turn = self._policy.turns[self._policy.reply_ids.index(reply.id)]
        reported = self._reported(call, reply, turn)
        if key is not None:
            self._memory.remember(key, reported, reply)
        return reported

    def _reported(self, call: CompletionRequest, reply: Reply, turn: Turn) -> ReportedReply:
        content: str = reply.message["content"]
        tool_calls = reply.message.get("tool_calls", [])
        if call.form is not None and call.prompt is None and self._codec.begins_thought:
            content = content.partition(THOUGHT_TAG)[2].lstrip()  # what has the form comes after it
        stops = [(at, stop) for stop in call.stop if (at := content.find(stop)) >= 0]
        stop_sequence = None
        finish: Finish = "length" if reply.finish_reason == "length" else "tool_calls" if tool_calls else "stop"
        if stops:
            at, stop_sequence = min(stops)
            content = content[:at]
            finish = finish if tool_calls else "stop_sequence"
        return ReportedReply(
            content=content,
            tool_calls=tool_calls,
            finish=finish,
            stop_sequence=stop_sequence,
            num_prompt_tokens=len(turn.prompt_ids),
            num_output_tokens=len(reply.token_ids),
            logprobs=self._logprobs(reply) if call.wants_logprobs else None,
            turn=turn,
        )

    def _logprobs(self, reply: Reply) -> list[TokenLogprob]:
        def told(token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
            text = self._codec.decode([token], skip_special_tokens=False)
            return TokenLogprob(text, logprob, [told(*one) for one in top])

        tops = reply.top_logprobs or [[]] * len(reply.token_ids)
        return [told(*one) for one in zip(reply.token_ids, reply.logprobs, tops, strict=True)]


def find_session(sessions: Mapping[str, Session], session_id: str, key: str) -> Session:
    """Return the session whose key this is. How long that takes says nothing of what was wrong, nor how far.

    Raises:
        Refusal: it is none, or that of another session or of one that is closed.
    """
    session = sessions.get(session_id)
    is_key = hmac.compare_digest(key.encode(), (session.key if session else _NOBODYS_KEY).encode())
    if session is None or not is_key or session.is_closed:
        raise ended()
    return session


def ended() -> Refusal:
    """Return the refusal of a key whose trajectory is over."""
    return Refusal("unauthorized", "key: unknown here, or its trajectory has ended")


def _kind_of(error: RolloutError) -> RefusalKind:
    text = str(error)
    if isinstance(error, ContextFull):
        return "too_long"
    if isinstance(error, WorkflowError):
        return "bad_request"
    if not isinstance(error, GenerationError):
        return "internal"
    if "refused" not in text and not text.startswith("prompt:"):
        return "unavailable"
    return "too_long" if "context" in text or "too long" in text else "bad_request"
