"""The streaming client: one completion, whatever becomes of the servers meanwhile.

A stream that breaks goes on, on the same or another server, from the tokens already received, so that no
token is lost or repeated and none is generated twice, but for those that a server could not go on from (``request``).
A deadline on the whole is for users who ask for it: a long answer is not a slow one. A prompt that no server could
take never leaves: a token id outside the vocabulary ends a real SGLang process, with everybody's requests, and one
with more placeholders than images is refused there, or answered about others. Prompts are expanded here, as
everywhere; only a request has one placeholder for each image.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio
import structlog

from areal_async.config.settings import InferenceSettings
from areal_async.errors import ContextFull, GenerationError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.inference.commands import DETERMINISTIC, choose_backend, draws_by_seed
from areal_async.inference.completion import Completion
from areal_async.inference.faults import ServerFault, SilenceFault
from areal_async.inference.http import StreamClient, StreamTransport, make_client
from areal_async.inference.pool import KEPT_TOKENS, MIN_ROOM_TOKENS, ServerHandle, ServerPool
from areal_async.inference.request import check_token_ids
from areal_async.inference.siblings import Prefill, current_group, lead_or_wait
from areal_async.inference.streams import TokenStreams
from areal_async.protocol.types import Turn
from areal_async.telemetry import spans
from areal_async.vision.images import Image
from areal_async.vision.spec import VisionSpec

MAX_FRUITLESS_STREAMS = 6
"""Streams in a row that may end without a single new token before the completion is given up."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
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
        vocab_size: int,
        model: str = "",
        vision: VisionSpec | None = None,
    ) -> None:
        """Take ``vocab_size`` of the model.

        Args:
            model: what the servers serve, as traces name it.
            vision: how it sees; ``None`` where it does not.
        """
        self._model = model
        self._vision = vision
        self.pool = pool
        self._settings = settings
        self._vocab_size = vocab_size
        self._draws_by_seed = draws_by_seed(settings)
        self._holds_siblings = choose_backend(settings) == "sglang"  # the embedded engine joins equal prompts itself
        self._generation = StreamClient(StreamTransport(max_connections=max_streams))
        self.administration = make_client(max_connections=NUM_ADMIN_CONNECTIONS)
        self._streams = TokenStreams(self._generation, self.administration, settings, pool.clock)
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
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        """Return one whole completion, and the server that ended it (its cache holds the prefix).

        Args:
            prompt_ids: expanded, where there are images.
            sampling_params: SGLang's, with ``max_new_tokens``; ``stop_token_ids`` as well where there are any, and
                ``top_logprobs_num``, which is beside them in a request.
            on_tokens: called with the tokens as they come, each once, however many streams break.
            images: in the prompt, in the order of their tokens.

        Raises:
            ContextFull: the prompt leaves no room for an answer in the server's context.
            GenerationError: no server may be sent this prompt, one refused it or sees its images in other sizes, none
                got anywhere with it, or ``inference.total_deadline_s`` is over; without one, the caller's episode is
                the only deadline of the whole.
        """
        check_prompt(prompt_ids, self._vocab_size)
        check_token_ids(sampling_params, self._vocab_size)
        if sampling_params.get("sampling_seed") is not None and not self._draws_by_seed:
            raise GenerationError(
                "seed: refused: got one with servers that do not draw by it, need the embedded engine or "
                f"{DETERMINISTIC} in inference.flags; leave it out"
            )
        completion = Completion(prompt_ids, sampling_params, on_tokens=on_tokens, images=images, vision=self._vision)
        with spans.completion(self._model, len(prompt_ids), sampling_params) as span:
            try:
                async with self.pool.clock.timeout(self._settings.total_deadline_s) as deadline:
                    turn, server = await self._complete(completion, preferred)
                    spans.note_turn(span, turn, server_id=server.id)
                    return turn, server
            except TimeoutError:
                if not deadline.expired():
                    raise
            raise GenerationError(
                f"generation: got {len(completion.output_ids)} of at most {sampling_params['max_new_tokens']} tokens "
                f"within inference.total_deadline_s = {self._settings.total_deadline_s:g} s"
            )

    async def _complete(self, completion: Completion, preferred: ServerHandle | None) -> tuple[Turn, ServerHandle]:
        cost_tokens = len(completion.prompt_ids) + completion.num_tokens_left
        num_fruitless = 0
        cause = ""
        group = current_group()
        is_held_back = group is not None and preferred is None and self._holds_siblings
        while num_fruitless < MAX_FRUITLESS_STREAMS:
            server = preferred = await self.pool.choose(preferred, cost_tokens=cost_tokens, group=group)
            num_furthest_before = completion.num_furthest
            is_faulty = False
            prefill: Prefill | None = None
            try:
                if group is not None and is_held_back:
                    is_held_back = False
                    prefill = await lead_or_wait(group, server, completion.prompt_ids)
                    if not server.is_serviceable or server.is_held:  # any more
                        continue
                _fit(completion, server)
                if completion.finish_reason:  # resumed where what was received has filled the context
                    return completion.turn(), server
                await self._streams.receive(server, completion, on_begun=prefill.begin if prefill is not None else None)
            except ServerFault as exc:
                is_faulty = True
                cause = f"{type(exc.__cause__).__name__}: {exc}" if exc.__cause__ else str(exc)
                log.warning("stream.broken", server_id=server.id, cause=cause, num_tokens=len(completion.output_ids))
                kind = type(exc.__cause__ or exc).__name__
                spans.note_break(server.id, kind, cause, num_tokens=len(completion.output_ids))
                self.pool.cast_doubt(server, cause, is_silent=isinstance(exc, SilenceFault))
            finally:
                if prefill is not None:
                    prefill.end()
                self.pool.release(server, cost_tokens=cost_tokens, group=group)
            completion.end_stream()
            if completion.finish_reason:
                return completion.turn(), server
            if completion.num_furthest > num_furthest_before:
                num_fruitless = 0
            elif is_faulty:  # a pause in mode ``abort`` is nobody's fault, however often it comes
                num_fruitless += 1
            await anyio.sleep(backoff_s(num_fruitless))
        raise GenerationError(f"generation: {num_fruitless} streams in a row gave no new token, the last one: {cause}")


def _fit(completion: Completion, server: ServerHandle) -> None:
    """Ask for no longer an answer than there is room for in the server's context.

    Raises:
        ContextFull: there is none.
    """
    if server.context_tokens is None:
        return
    left_tokens = server.context_tokens - len(completion.prompt_ids) - len(completion.output_ids)
    room_tokens = left_tokens - KEPT_TOKENS if left_tokens >= MIN_ROOM_TOKENS else 0
    if not room_tokens and not completion.output_ids:
        raise ContextFull(len(completion.prompt_ids), server.context_tokens, "inference.context_length or the model's")
    completion.fit(room_tokens)


def backoff_s(num_failures: int) -> float:
    """Return how long to wait before asking again after so many failures in a row."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**num_failures)


def check_prompt(prompt_ids: list[int], vocab_size: int) -> None:
    """Refuse a prompt that no server may be sent.

    Raises:
        GenerationError: it is empty, or has a token outside the vocabulary.
    """
    if not prompt_ids:
        raise GenerationError("prompt: got no tokens, need at least one")
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        foreign = lowest if lowest < 0 else highest
        raise GenerationError(
            f"prompt: got token id {foreign} at position {prompt_ids.index(foreign)}, need 0 to {vocab_size - 1}: "
            f"the model's vocabulary has {vocab_size}"
        )
