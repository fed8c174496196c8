"""One request on its way through the engine, and the pieces of answer it gives off."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_async.inference.embedded.engine.grammar import Grammar
from areal_async.inference.embedded.engine.images import PromptImages, SeenImage
from areal_async.inference.embedded.engine.protocol import SamplingParams
from areal_async.inference.embedded.engine.text import StopStrings

FinishReason = dict[str, Any]
TopLogprobs = list[tuple[float, int]]
"""The likeliest tokens at one position, likeliest first, as (logprob, id)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sequence produced since its last piece."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    """One per token where they were asked for, else none."""
    weight_version: str
    """Version that produced the newest token; before the first, the version that the engine runs."""
    num_output_tokens: int
    num_retractions: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    weight_versions: list[dict[str, Any]] | None = None
    """Spans over the output tokens; in the last piece only."""


@dataclass(eq=False, kw_only=True, slots=True)
class RunningSequence:
    """A request's tokens and its place in the engine. Owned by the model thread once submitted."""

    rid: str
    prompt_ids: tuple[int, ...]
    images: PromptImages | None = None
    """What ``prompt_ids`` show; None for text alone."""
    params: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that may not come before ``min_new_tokens``, whether or not they would end the answer."""
    stop_strings: StopStrings | None
    grammar: Grammar | None = None
    """As far as ``output_ids`` have come in it."""
    num_top_logprobs: int = 0
    seed: int
    """Unsigned 64 bits; with the token's index it fixes every draw."""
    stream_interval: int | None
    """Tokens per piece; None gives one piece at the end."""
    emit: Callable[["RunningSequence", Piece], None]
    """Called on the event loop's thread with this sequence."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Its number by the order in which sequences came."""
    slot: int = -1
    """Position in the batch and in the cache; -1 while waiting."""
    prompt_epoch: int = -1
    """Which weights computed the prompt's keys and values; others may copy them only within that epoch."""
    cached_tokens: int = 0
    num_retractions: int = 0
    version_changes: list[tuple[str, int]] = field(default_factory=list)
    """(version until then, tokens by then) for each change of weights that met this sequence with output."""
    num_emitted: int = 0
    is_poisoned: bool = False
    """Whether the model produced NaN for it: then its cache holds some too."""

    @property
    def shown(self) -> tuple[SeenImage, ...]:
        """The images of the prompt: prompts of the same tokens may show others."""
        return () if self.images is None else self.images.images

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt_ids, *self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def longest_tokens(self) -> int:
        """The length this sequence may reach."""
        return len(self.prompt_ids) + self.max_new_tokens

    def append(self, token_id: int, logprob: float, top_logprobs: TopLogprobs | None = None) -> bool:
        """Take one sampled token; decide whether it ends the answer. Returns whether text may be streamed now.

        The order is SGLang's: stop string, then stop token, then length, then the end of the grammar.
        """
        if self.grammar is not None:
            if self.grammar.is_stuck:
                message = "grammar: the vocabulary has no token that could go on here; choose another"
                self.finish_reason = abort_reason(message, 400)
                return True
            self.grammar.accept(token_id)
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.num_top_logprobs:
            self.top_logprobs.append((top_logprobs or [])[: self.num_top_logprobs])
        matched, may_stop = (None, False)
        if self.stop_strings is not None:
            matched, may_stop = self.stop_strings.match(self.output_ids)
        if logprob != logprob:  # NaN
            self.is_poisoned = True
            message = "the model produced NaN; its weights are broken"
            self.finish_reason = abort_reason(message, 500)
        elif matched is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        elif token_id in self.stop_token_ids:
            self.finish_reason = {"type": "stop", "matched": token_id}
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.max_new_tokens}
        elif self.grammar is not None and self.grammar.is_over:
            self.finish_reason = {"type": "stop", "matched": token_id}
        return self.finish_reason is not None or (not may_stop and self._is_piece_due())

    def _is_piece_due(self) -> bool:
        if self.stream_interval is None:
            return False
        return self.num_emitted == 0 or len(self.output_ids) - self.num_emitted >= self.stream_interval

    def take_piece(self, weight_version: str) -> Piece:
        """Hand out what was not handed out yet; ``weight_version`` is what the engine runs now."""
        spans = None if self.finish_reason is None else self.version_spans(weight_version)
        start, self.num_emitted = self.num_emitted, len(self.output_ids)
        return Piece(
            token_ids=self.output_ids[start:],
            logprobs=self.logprobs[start:],
            top_logprobs=self.top_logprobs[start:],
            weight_version=spans[-1]["version"] if spans else weight_version,
            num_output_tokens=len(self.output_ids),
            num_retractions=self.num_retractions,
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            weight_versions=spans,
        )

    def version_spans(self, current_version: str) -> list[dict[str, Any]]:
        """Say which version produced which output tokens; without output, one empty span of the current one."""
        spans: list[dict[str, Any]] = []
        for version, end in [*self.version_changes, (current_version, len(self.output_ids))]:
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": start, "end": end})
        return spans


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> FinishReason:
    """Build the finish reason of a request that was ended from outside; with a status, of one that is answered so."""
    err_type = {400: "BadRequestError", 500: "InternalServerError"}.get(status_code) if status_code else None
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}
