"""The streaming client: one completion, whatever becomes of the servers meanwhile.

A stream that breaks goes on, on the same or another server, from the tokens already received, so that no
token is lost or repeated and none is generated twice, but for those that a server could not go on from (``request``).
Deadlines are set between events; one on the whole is for users who ask for it: a long answer is not a slow one. A
prompt that no server could take never leaves: a token id outside the vocabulary ends a real SGLang process, with
everybody's requests.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio
import httpx
import msgspec
import structlog

from areal_async.config.settings import InferenceSettings
from areal_async.errors import ContextFull, GenerationError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.inference.commands import DETERMINISTIC, draws_by_seed
from areal_async.inference.completion import Completion
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import (
    TRANSPORT_ERRORS,
    ServerApi,
    StreamClient,
    StreamTransport,
    error_message,
    make_client,
)
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.request import check_token_ids
from areal_async.inference.sse import DONE, EventSplitter, decode_chunk
from areal_async.process.plain_text import escaped
from areal_async.protocol.types import Turn
from areal_async.telemetry import spans, tracing, wait_graph
from areal_async.telemetry.wait_graph import Wait

MAX_FRUITLESS_STREAMS = 6
"""Streams in a row that may end without a single new token before the completion is given up."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
DEADLINE_SLACK = 0.1
"""Share of the deadline between two events by which it may be overrun."""
ABORT_DEADLINE_S = 2.0
NUM_ADMIN_CONNECTIONS = 256

log = structlog.get_logger()


class InferenceClient:
    """Streams completions from the servers of a pool. An async context manager that owns the connections."""

    def __init__(
        self,
        pool: ServerPool,
        settings: InferenceSettings,
        *,
        max_streams: int,
        vocab_size: int | None = None,
        model: str = "",
    ) -> None:
        """Take ``vocab_size`` of the model; ``None`` for a caller whose prompts are its own and known to be good.

        Args:
            model: what the servers serve, as traces name it.
        """
        self._model = model
        self.pool = pool
        self._settings = settings
        self._vocab_size = vocab_size
        self._draws_by_seed = draws_by_seed(settings)
        self._generation = StreamClient(StreamTransport(max_connections=max_streams))
        self.administration = make_client(max_connections=NUM_ADMIN_CONNECTIONS)
        parser = settings.tool_call_parser
        self.call_parser = EngineCallParser(pool, self.administration, name=parser) if parser is not None else None
        """The servers' own, where ``inference.tool_call_parser`` names one."""
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._resources.enter_async_context(self._generation)
        await self._resources.enter_async_context(self.administration)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._resources.aclose()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> tuple[Turn, ServerHandle]:
        """Return one whole completion, and the server that ended it (its cache holds the prefix).

        Args:
            sampling_params: SGLang's, with ``max_new_tokens``; ``stop_token_ids`` as well where there are any, and
                ``top_logprobs_num``, which is beside them in a request.
            on_tokens: called with the tokens as they come, each once, however many streams break.

        Raises:
            ContextFull: the prompt leaves no room for an answer in the server's context.
            GenerationError: no server may be sent this prompt, one refused it, none got anywhere with it, or
                ``inference.total_deadline_s`` is over; without one, the caller's episode is the only deadline of
                the whole.
        """
        check_prompt(prompt_ids, self._vocab_size)
        if self._vocab_size is not None:
            check_token_ids(sampling_params, self._vocab_size)
        if sampling_params.get("sampling_seed") is not None and not self._draws_by_seed:
            raise GenerationError(
                "seed: refused: got one with servers that do not draw by it, need the embedded engine or "
                f"{DETERMINISTIC} in inference.flags; leave it out"
            )
        completion = Completion(prompt_ids, sampling_params, on_tokens=on_tokens)
        with spans.completion(self._model, len(prompt_ids), sampling_params) as span:
            with anyio.move_on_after(self._settings.total_deadline_s):
                turn, server = await self._complete(completion, preferred)
                spans.note_turn(span, turn, server_id=server.id)
                return turn, server
            raise GenerationError(
                f"generation: got {len(completion.output_ids)} of at most {sampling_params['max_new_tokens']} tokens "
                f"within inference.total_deadline_s = {self._settings.total_deadline_s:g} s"
            )

    async def _complete(self, completion: Completion, preferred: ServerHandle | None) -> tuple[Turn, ServerHandle]:
        cost_tokens = len(completion.prompt_ids) + completion.num_tokens_left
        num_fruitless = 0
        cause = ""
        while num_fruitless < MAX_FRUITLESS_STREAMS:
            server = preferred = await self.pool.choose(preferred, cost_tokens=cost_tokens)
            num_furthest_before = completion.num_furthest
            is_faulty = False
            try:
                _fit(completion, server)
                if completion.finish_reason:  # resumed where what was received has filled the context
                    return completion.turn(), server
                await self._stream(server, completion)
            except ServerFault as exc:
                is_faulty = True
                cause = f"{type(exc.__cause__).__name__}: {exc}" if exc.__cause__ else str(exc)
                log.warning("stream.broken", server_id=server.id, cause=cause, num_tokens=len(completion.output_ids))
                kind = type(exc.__cause__ or exc).__name__
                spans.note_break(server.id, kind, cause, num_tokens=len(completion.output_ids))
                self.pool.cast_doubt(server, cause)
            finally:
                self.pool.release(server, cost_tokens=cost_tokens)
            completion.end_stream()
            if completion.finish_reason:
                return completion.turn(), server
            if completion.num_furthest > num_furthest_before:
                num_fruitless = 0
            elif is_faulty:  # a pause in mode ``abort`` is nobody's fault, however often it comes
                num_fruitless += 1
            await anyio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**num_fruitless))
        raise GenerationError(f"generation: {num_fruitless} streams in a row gave no new token, the last one: {cause}")

    async def _stream(self, server: ServerHandle, completion: Completion) -> None:
        """Receive as much of the completion as one stream gives.

        Raises:
            ServerFault: it broke; what was received is kept.
            GenerationError: the request itself is at fault.
        """
        completion.begin_stream(server.version)
        request_id = os.urandom(16).hex()
        body = {
            "rid": request_id,
            # Prefixes cached under other weights are not for this request: an update in place cannot flush them.
            "cache_salt": server.version,
            **completion.request,
            "return_logprob": True,
            "stream": True,
        }
        spans.note_stream(server.id, server.version, num_tokens=len(completion.output_ids))
        is_over = False
        try:
            with wait_graph.on(wait_graph.server(server.id), "a stream on") as wait:
                await self._receive(server, msgspec.json.encode(body), completion, wait)
            is_over = True
        except TRANSPORT_ERRORS as exc:
            raise ServerFault(str(exc) or "connection lost") from exc
        finally:
            if not is_over:
                await self._abort(server, request_id)

    async def _receive(self, server: ServerHandle, body: bytes, completion: Completion, wait: Wait) -> None:
        splitter = EventSplitter()
        is_over = False
        now_s = asyncio.get_running_loop().time
        limit_s = self._settings.first_token_deadline_s
        renewed_until_s = 0.0
        asked_s = time.monotonic()  # a loop's own clock may go by milliseconds
        num_before, is_silent = len(completion.output_ids), True
        try:
            async with (
                asyncio.timeout(limit_s) as deadline,
                self._generation.post(f"{server.url}/generate", body, headers=tracing.headers()) as response,
            ):
                if response.status_code != 200:
                    raise refusal(response.status_code, await response.aread())
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for data in response.stream:
                    events = splitter.feed(data)
                    for event in events:
                        if event != DONE:
                            is_over = self._take(server, event, completion) or is_over
                    if events:
                        wait.moved()
                        if is_silent and len(completion.output_ids) > num_before:
                            is_silent = False
                            server.num_first_tokens += 1
                            server.first_token_total_s += time.monotonic() - asked_s
                        limit_s = self._settings.between_tokens_deadline_s
                        due_s = now_s() + limit_s
                        if due_s > renewed_until_s:  # now and then: a timer moved at each event costs more than it
                            renewed_until_s = due_s + DEADLINE_SLACK * limit_s
                            deadline.reschedule(renewed_until_s)
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            if not is_over:
                raise ServerFault(f"no event for {limit_s:g} s") from exc
        if not is_over:
            raise ServerFault("the stream ended early")

    def _take(self, server: ServerHandle, event: bytes, completion: Completion) -> bool:
        """Add one event; say whether it is the last."""
        chunk = decode_chunk(event)
        if chunk.error is not None or chunk.meta_info is None:
            raise GenerationError(f"generation: {server.id} refused the request: {error_message(event)}")
        if chunk.output_ids and not completion.num_furthest:
            spans.note_first_token()
        completion.add(chunk.output_ids, chunk.meta_info)
        server.num_generated_tokens += len(chunk.output_ids)
        reason = chunk.meta_info.finish_reason
        if reason is not None and reason.type == "abort" and (reason.status_code or 0) >= 500:
            raise ServerFault(f"aborted with status {reason.status_code}: {escaped(reason.message or '')}")
        return reason is not None

    async def _abort(self, server: ServerHandle, request_id: str) -> None:
        """Tell the server, as well as it can be done quickly, that nobody waits for this any more."""
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            try:
                api = ServerApi(self.administration, server.url, admin_key=server.admin_key)
                await api.abort(request_id, deadline_s=ABORT_DEADLINE_S)
            except ServerFault as exc:
                log.debug("stream.abort_failed", url=server.url, cause=str(exc))


def _fit(completion: Completion, server: ServerHandle) -> None:
    """Ask for no longer an answer than there is room for in the server's context.

    Raises:
        ContextFull: there is none.
    """
    room_tokens = server.room_after(len(completion.prompt_ids) + len(completion.output_ids))
    if room_tokens is None:
        return
    if not room_tokens and not completion.output_ids:
        assert server.context_tokens is not None
        raise ContextFull(len(completion.prompt_ids), server.context_tokens, "inference.context_length or the model's")
    completion.fit(room_tokens)


def check_prompt(prompt_ids: list[int], vocab_size: int | None) -> None:
    """Refuse a prompt that no server may be sent.

    Raises:
        GenerationError: it is empty, or has a token outside the vocabulary.
    """
    if not prompt_ids:
        raise GenerationError("prompt: got no tokens, need at least one")
    if vocab_size is None:
        return
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        foreign = lowest if lowest < 0 else highest
        raise GenerationError(
            f"prompt: got token id {foreign} at position {prompt_ids.index(foreign)}, need 0 to {vocab_size - 1}: "
            f"the model's vocabulary has {vocab_size}"
        )


def refusal(status: int, body: bytes, *, what: str = "generation") -> Exception:
    """Return the error that a status other than 200 means: 4xx is the request's own fault."""
    message = error_message(body)
    if 400 <= status < 500 and status not in (408, 429):
        return GenerationError(f"{what}: refused with status {status}: {message}")
    return ServerFault(f"status {status}: {message}")
