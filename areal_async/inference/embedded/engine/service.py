"""The front door on the event loop: which requests are open, who may enter, and the administration of the weights.

Invariants: a request enters the model thread only while the door is open (not paused, not updating); every request
leaves through exactly one final piece or by its client's disconnect; administration is done one call at a time.
"""

import asyncio
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.inference.embedded.engine.answers import OpenRequest
from areal_async.inference.embedded.engine.errors import RequestError, WeightsError
from areal_async.inference.embedded.engine.grammar import Grammar, Grammars
from areal_async.inference.embedded.engine.images import ImageReader, SeenImage
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.protocol import SamplingParams, check_length, check_prompt_ids
from areal_async.inference.embedded.engine.runner import ModelRunner, ScoringRunner
from areal_async.inference.embedded.engine.scheduler import PauseMode, Scheduler
from areal_async.inference.embedded.engine.scoring import ScoreLine
from areal_async.inference.embedded.engine.sequence import FinishReason, Piece, RunningSequence, abort_reason
from areal_async.inference.embedded.engine.text import StopStrings, TextStream, Tokenizer
from areal_async.inference.embedded.engine.weights import StagedWeights, checksum_weights, shown_weights, stage_weights
from areal_async.inference.embedded.engine.worker import ModelThread

log = structlog.get_logger()


class WeightsUpdate(msgspec.Struct, kw_only=True):
    """What an update of the weights is to do beside them, wherever they come from."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False

    def outcome(self, done: str, *, is_flushed: bool) -> str:
        """Say that the update was ``done``.

        Raises:
            WeightsError: it was, but the cache was not flushed as asked for.
        """
        if not is_flushed:
            raise WeightsError(
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        return f"{done} Weight version updated to {self.weight_version}." if self.weight_version is not None else done


class DiskUpdate(WeightsUpdate, kw_only=True):
    """An update from a folder."""

    model_path: str


class EngineService:
    """Everything the routes do, without HTTP."""

    def __init__(
        self, runner: ModelRunner, thread: ModelThread, options: EngineOptions, tokenizer: Tokenizer | None
    ) -> None:
        self.runner = runner
        self.thread = thread
        self.options = options
        self.tokenizer = tokenizer
        self.model_path = options.model_path
        self.served_model_name = options.served_model_name or options.model_path
        """Folder that the served weights came from; updates change it."""
        self.weight_version = options.weight_version
        own_id = None if tokenizer is None else tokenizer.eos_token_id
        self._eos_token_ids = runner.eos_token_ids | (set() if own_id is None else {own_id})
        self.grammars = Grammars(tokenizer, vocab_size=runner.vocab_size, eos_token_ids=self._eos_token_ids)
        self.images = ImageReader(runner.vision)
        self._line = ScoreLine(runner, thread) if isinstance(runner, ScoringRunner) else None
        self._requests: dict[str, OpenRequest] = {}
        self._random = random.Random(options.random_seed)
        self.is_paused = False
        """Generation is paused."""
        self._is_updating = False
        self.at_door: deque[OpenRequest] = deque()
        """Requests held back by a pause or an update."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_submitted = 0
        self.administration = anyio.Lock()
        """Held by whatever changes the weights, or says what a change means."""

    @property
    def is_generation(self) -> bool:
        """Whether the model generates; else it scores."""
        return self._line is None

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer a request may ask for."""
        return min(self.runner.context_length, self.runner.max_total_tokens)

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        images: tuple[SeenImage, ...] = (),
        rid: str | None = None,
        is_stream: bool = False,
        return_logprob: bool = False,
        return_prompt_token_ids: bool = False,
        grammar: Grammar | None = None,
        num_top_logprobs: int = 0,
    ) -> OpenRequest:
        """Check and register one request; ``enter`` starts it, ``close`` must follow.

        Args:
            prompt_ids: with one placeholder for each of ``images``.

        Raises:
            RequestError: it can never be served.
        """
        if not self.is_generation:
            raise RequestError("this server was started with --is-embedding: it scores; send the prompt to /classify")
        rid = rid or uuid.uuid4().hex
        if rid in self._requests:
            raise RequestError(f"Duplicate request ID detected: {rid}")
        prompt_ids, placed = self.images.place(prompt_ids, images)
        check_prompt_ids(prompt_ids, vocab_size=self.runner.vocab_size, context_length=self.context_length)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: the model has no tokenizer to match strings with; use stop_token_ids")
        foreign = [i for i in params.logit_bias if not 0 <= i < self.runner.vocab_size]
        if foreign:
            raise RequestError(f"logit_bias must have keys in [0, {self.runner.vocab_size - 1}], got {foreign[0]}.")
        end_token_ids = frozenset(
            i for i in params.stop_token_ids | self._eos_token_ids if 0 <= i < self.runner.vocab_size
        )
        seed = self._random.getrandbits(64) if params.sampling_seed is None else params.sampling_seed % 2**64
        sequence = RunningSequence(
            rid=rid,
            prompt_ids=tuple(prompt_ids),
            images=placed,
            params=params,
            max_new_tokens=check_length(len(prompt_ids), params, context_length=self.context_length),
            stop_token_ids=frozenset() if params.ignore_eos else end_token_ids,
            end_token_ids=end_token_ids,
            grammar=grammar,
            num_top_logprobs=num_top_logprobs,
            stop_strings=StopStrings(self.tokenizer, params.stop) if params.stop and self.tokenizer else None,
            seed=seed,
            stream_interval=(params.stream_interval or self.options.stream_interval) if is_stream else None,
            emit=self._deliver,
        )
        text = None
        if self.tokenizer is not None:
            trimming = {"skip_special_tokens": params.skip_special_tokens, "no_stop_trim": params.no_stop_trim}
            text = TextStream(self.tokenizer, **trimming)
        request = self._requests[rid] = OpenRequest(
            sequence=sequence,
            text=text,
            return_logprob=return_logprob,
            return_prompt_token_ids=return_prompt_token_ids,
        )
        return request

    async def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return what the classifier's head says at the last token of each prompt.

        Raises:
            RequestError: the model generates, or a prompt can never be scored.
        """
        line, runner = self._line, self.runner
        if line is None:
            raise RequestError("this server generates; start one of a sequence classifier with --is-embedding")
        for prompt_ids in prompts:
            check_prompt_ids(prompt_ids, vocab_size=runner.vocab_size, context_length=runner.context_length)
        return await asyncio.gather(*(line.score(prompt_ids) for prompt_ids in prompts))

    def enter(self, request: OpenRequest) -> None:
        """Hand a request to the model thread, or let it wait at the door while that is closed."""
        if self.is_paused or self._is_updating:
            self.at_door.append(request)
        else:
            self._submit(request)

    def close(self, request: OpenRequest) -> None:
        """Forget a request whose client is done with it; one that is not finished is aborted."""
        rid = request.sequence.rid
        if self._requests.get(rid) is not request:
            return
        del self._requests[rid]
        if request.is_submitted:
            self.thread.post(lambda scheduler: scheduler.abort(rid))
        elif request in self.at_door:
            self.at_door.remove(request)

    def _submit(self, request: OpenRequest) -> None:
        request.is_submitted = True
        self._num_submitted += 1
        self._is_idle = asyncio.Event() if self._is_idle.is_set() else self._is_idle
        self.thread.post(lambda scheduler: scheduler.submit(request.sequence))

    def _open_door(self) -> None:
        while self.at_door and not (self.is_paused or self._is_updating):
            self._submit(self.at_door.popleft())

    def _deliver(self, sequence: RunningSequence, piece: Piece) -> None:
        if piece.finish_reason is not None:
            self._num_submitted -= 1
            if self._num_submitted == 0:
                self._is_idle.set()
        request = self._requests.get(sequence.rid)
        if request is None or request.sequence is not sequence:
            return  # its client is gone
        if piece.finish_reason is not None:
            del self._requests[sequence.rid]
        request.push(piece)

    def abort(self, rid: str) -> None:
        """End one request; an unknown id is no error, it may just have finished."""
        request = self._requests.get(rid)
        if request is None:
            return
        if request.is_submitted:
            self.thread.post(lambda scheduler: scheduler.abort(rid))
        else:
            self.at_door.remove(request)
            self._end(request, {"type": "abort", "message": "Abort in waiting queue"})

    def abort_all(self) -> None:
        """End every request the model thread has; those at the door go on waiting, as in SGLang."""
        self.thread.post(lambda scheduler: scheduler.abort_all())

    def fail_all(self, message: str) -> None:
        """End every request when the model thread is gone."""
        for request in list(self._requests.values()):
            self._end(request, abort_reason(message, 500))
        if self._line is not None:
            self._line.fail_all(message)

    def _end(self, request: OpenRequest, reason: FinishReason) -> None:
        del self._requests[request.sequence.rid]
        request.sequence.finish_reason = reason
        request.push(request.sequence.take_piece(self.weight_version))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, after doing to the running requests what ``mode`` says."""
        self.is_paused = True
        await self.thread.call(lambda scheduler: scheduler.pause(mode))
        log.info("generation.paused", mode=mode.value)

    async def resume(self) -> None:
        """Generate again."""
        await self.thread.call(lambda scheduler: scheduler.resume())
        self.is_paused = False
        self._open_door()
        log.info("generation.continued")

    async def update_weights_from_disk(self, order: DiskUpdate) -> str:
        """Serve the weights of a folder and say so, or go on with the old ones when they cannot be loaded.

        The folder of an adapter is served merged into the weights as they are without one.

        Raises:
            WeightsError: they cannot be loaded, or were and the cache could not be flushed.
        """
        path = order.model_path

        async def stage() -> StagedWeights:
            return await anyio.to_thread.run_sync(stage_weights, self.runner.model, path, self.runner.merged)

        try:
            is_flushed = await self.update_weights(stage, order)
        except WeightsError as exc:
            log.warning("weights.refused", model_path=path, reason=str(exc))
            raise WeightsError(f"Failed to update weights: {exc}.") from exc
        self.model_path = self.served_model_name = path
        log.info("weights.updated", model_path=path, weight_version=self.weight_version)
        return order.outcome("Succeeded to update model weights.", is_flushed=is_flushed)

    async def update_weights(self, stage: Callable[[], Awaitable[StagedWeights]], order: WeightsUpdate) -> bool:
        """Serve what ``stage`` returns from the next step on; updates are staged and applied one after the other.

        While generation is not paused, new requests wait and the running ones finish under the old weights first.
        Returns False when the cache was to be flushed and could not be.

        Raises:
            WeightsError: ``stage`` raised it; nothing has changed.
        """

        def swap(scheduler: Scheduler) -> bool:
            scheduler.apply_weights(staged, order.weight_version)
            return scheduler.flush_cache() if order.flush_cache else True

        async with self.administration:
            staged = await stage()
            if order.abort_all_requests:
                self.abort_all()
            self._is_updating = not self.is_paused
            try:
                if self._is_updating:
                    await self._is_idle.wait()
                is_flushed = await self.thread.call(swap)
            finally:
                self._is_updating = False
                self._open_door()
            self.weight_version = order.weight_version or self.weight_version
        return is_flushed

    async def checksum_weights(self) -> dict[str, str]:
        """Return the SHA-256 of every tensor served at one moment, and of an adapter and what it is merged into."""
        tensors = await self.thread.call(lambda scheduler: shown_weights(self.runner.model, self.runner.merged))
        return await anyio.to_thread.run_sync(checksum_weights, tensors)
