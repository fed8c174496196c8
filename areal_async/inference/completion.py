"""One completion as it grows, over however many streams it takes, out of the events that SGLang sends.

A new stream goes on from the tokens that the ones before it have brought, less those that have to be said again
(``request``). Nobody is told a token before it is certain to stay.

Invariant: every token is here once, with its logprob, and stamped with a version that is never newer than
the one that made it. The server's spans (in the last event) are exact and are used when they are there. A
stream that broke has only the stamp of each event, which names the version at the time of *sending*; its
tokens then get the older of that stamp and the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_async.errors import GenerationError
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import error_message
from areal_async.inference.pool import ServerHandle
from areal_async.inference.request import BESIDE, collapsed_ids, is_steered, num_held_back, ref_of, request_fields
from areal_async.process.plain_text import escaped
from areal_async.protocol.types import Turn, Version, VersionSpan
from areal_async.telemetry import spans
from areal_async.vision.images import Image
from areal_async.vision.spec import VisionSpec

parse_version = lru_cache(maxsize=1024)(Version.parse)

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Logprob = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
"""Within 32 bits: SGLang writes the smallest such number for what has no probability."""

IMPOSSIBLE = -3e38
"""Log-probability below which a token has none."""
TopLogprobs = list[list[tuple[Logprob, int, Any]]]
"""The likeliest tokens at each position, likeliest first, as (logprob, id, text)."""


class FinishReason(msgspec.Struct, gc=False):
    """Why a request ended."""

    type: str = ""
    message: str | None = None
    status_code: int | None = None

    @property
    def is_refusal(self) -> bool:
        """Whether the request itself was at fault."""
        return self.type == "abort" and 400 <= (self.status_code or 0) < 500


class TokenSpan(msgspec.Struct, gc=False):
    """Output tokens ``[start, end)`` of this request, and the version that made them."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, gc=False):
    """What SGLang tells about a request beside its tokens."""

    weight_version: str = ""
    weight_versions: list[TokenSpan] | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    """Tokens of this request's prompt, each image with as many as the server sees in it."""
    cached_tokens: int = 0
    """Those of the prompt that it did not have to compute."""
    completion_tokens: int | None = None
    """Output tokens of this request so far, in all events together."""
    output_token_logprobs: list[tuple[Logprob, int, Any]] | None = None
    output_top_logprobs: TopLogprobs | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event: only what is new since the last, and in an error event neither."""

    output_ids: list[TokenId] = []
    meta_info: MetaInfo | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(event: bytes) -> Chunk:
    """Decode one event.

    Raises:
        ServerFault: not an event of SGLang's.
    """
    try:
        return _decoder.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ServerFault(f"not an event: {exc}: {event[:200]!r}") from exc


class Completion:
    """Collects tokens. ``begin_stream``, ``add`` per event, ``end_stream``; again until ``finish_reason`` is set."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: Mapping[str, Any],
        *,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
        vision: VisionSpec | None = None,
    ) -> None:
        """Take what the whole of it is asked for.

        Args:
            params: SGLang's sampling parameters, with ``max_new_tokens``.
            on_tokens: called with new tokens as they come, each once.
            images: in the prompt, in the order of their tokens.
            vision: how the model sees; ``None`` where it does not.

        Raises:
            GenerationError: the prompt has more or fewer images than placeholders.
        """
        self._params = params
        self._num_held_back = num_held_back(params)
        self._on_tokens = on_tokens
        self._num_told = 0
        self.prompt_ids = prompt_ids
        self.images = images
        """Every stream is sent them anew: what it goes on from was said about them."""
        self._sent_ids = collapsed_ids(prompt_ids, len(images), vision)
        self._placeholders = set() if vision is None else {vision.image_token_id, vision.video_token_id}
        self._open_mark = vision.vision_start_token_id if vision is not None and images else None
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        """As ``Turn.top_logprobs``; empty where they are not asked for."""
        self.finish_reason = ""
        self.num_furthest = 0
        """Most tokens that it ever had: what was said again is no progress."""
        self._stop_token_ids = frozenset(params.get("stop_token_ids") or ())
        self._spans: list[tuple[Version, int, int]] = []
        self._oldest: Version | None = None
        self._server: ServerHandle
        self._stream_start = 0
        self.num_prompt_tokens = 0
        """Tokens of the prompts that servers have answered, over all streams."""
        self.num_cached_tokens = 0
        """Those of them that servers had in their caches, as they say."""
        self._stamped: list[tuple[Version, int, int]] = []
        self._stamp = Version(0, 0)
        self._last_meta: MetaInfo | None = None

    @property
    def num_tokens_left(self) -> int:
        """How many more may be generated."""
        return int(self._params["max_new_tokens"]) - len(self.output_ids)

    @property
    def request(self) -> dict[str, Any]:
        """What a stream that goes on from here is asked for, but for its images."""
        fields = request_fields(self._params, num_kept=len(self.output_ids))
        return {"input_ids": self._sent_ids + self.output_ids, **fields}

    @property
    def _num_certain(self) -> int:
        """Tokens that a new stream goes on from. None goes on from a mark before an image without one (``request``)."""
        num = max(0, len(self.output_ids) - self._num_held_back)
        while num and self.output_ids[num - 1] == self._open_mark:
            num -= 1
        return num

    def fit(self, room_tokens: int) -> None:
        """Generate at most so many more, for want of room; what ends there has ended by its length."""
        most = min(self._params["max_new_tokens"], len(self.output_ids) + room_tokens)
        self._params = {**self._params, "max_new_tokens": most}
        if self.num_tokens_left <= 0:
            self.finish_reason = "length"
            self._tell(len(self.output_ids))

    def begin_stream(self, server: ServerHandle) -> None:
        """Note the version that the server runs as the request is submitted, and drop what has to be said again."""
        self._server = server
        self._keep(self._num_certain)
        self._stamp = parse_version(server.version)
        if self._oldest is None or not self.output_ids:
            self._oldest = self._stamp
        self._oldest = min(self._oldest, self._stamp)
        self._stream_start = len(self.output_ids)
        self._stamped = []
        self._last_meta = None

    def add(self, event: bytes) -> bool:
        """Take one event of the stream; say whether it is the last.

        Raises:
            ServerFault: no event of SGLang's, tokens without logprobs or without a version, or the end of a stream
                that the server gave up.
            GenerationError: the server refuses the request or counts other tokens in its images, or the model has said
                a placeholder.
        """
        chunk = decode_chunk(event)
        if chunk.error is not None or chunk.meta_info is None:
            raise GenerationError(f"generation: {self._server.id} refused the request: {error_message(event)}")
        if chunk.output_ids and not self.num_furthest:
            spans.note_first_token()
        self._extend(chunk.output_ids, chunk.meta_info)
        self._server.num_generated_tokens += len(chunk.output_ids)
        reason = chunk.meta_info.finish_reason
        if reason is not None and reason.type == "abort" and (reason.status_code or 0) >= 500:
            raise ServerFault(f"aborted with status {reason.status_code}: {escaped(reason.message or '')}")
        return reason is not None

    def _extend(self, output_ids: list[int], meta: MetaInfo) -> None:
        logprobs = meta.output_token_logprobs or []
        is_abort = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if meta.finish_reason is not None and meta.finish_reason.is_refusal:
            output_ids, logprobs = [], []  # SGLang sends a token that was never drawn
        elif is_abort and meta.completion_tokens is not None:
            # SGLang's event for a request aborted while it waits (retracted, say) repeats, after what is new,
            # the last token and every logprob; its count is right.
            num_new = max(0, meta.completion_tokens - (len(self.output_ids) - self._stream_start))
            output_ids, logprobs = output_ids[:num_new], logprobs[:num_new]
        if len(logprobs) != len(output_ids):
            raise ServerFault(
                f"event of {len(output_ids)} tokens has {len(logprobs)} logprobs, need one each; "
                "start the server with --incremental-streaming-output"
            )
        if output_ids and self.images:
            self._check_images(meta)
        if self._placeholders and (said := self._placeholders.intersection(output_ids)):
            raise GenerationError(
                f"generation: the model has said token {min(said)}, the placeholder of an image or of a video, where "
                "none is: no server could go on from it, and nothing could train it"
            )
        if BESIDE in self._params:
            self.top_logprobs += _possible(meta.output_top_logprobs, len(output_ids))
        try:
            stamp = parse_version(meta.weight_version)
        except ValueError as exc:
            raise ServerFault(str(exc)) from exc
        if output_ids:
            start = len(self.output_ids)
            self.output_ids += output_ids
            self.logprobs += [entry[0] for entry in logprobs]
            older = stamp if stamp is self._stamp else min(stamp, self._stamp)
            self._stamped.append((older, start, len(self.output_ids)))
            self.num_furthest = max(self.num_furthest, len(self.output_ids))
            self._tell(self._num_certain)
        self._stamp = stamp
        self._last_meta = meta

    def end_stream(self) -> None:
        """Settle the versions of this stream's tokens, and whether the completion is over.

        Raises:
            GenerationError: the server refused the request, or its spans do not cover what it sent.
        """
        if self._last_meta is not None:
            self._count_prompt(self._last_meta)
        reason = self._last_meta.finish_reason if self._last_meta else None
        is_finished = reason is not None and reason.type != "abort"
        exact = self._exact_spans(is_finished=is_finished)
        self._spans += self._stamped if exact is None else exact
        if reason is not None and reason.is_refusal:
            raise GenerationError(f"server refused the request: {reason.message}")
        if is_finished and reason is not None:
            self.finish_reason = reason.type
        elif self.output_ids and self.output_ids[-1] in self._stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_tokens_left <= 0:
            self.finish_reason = "length"
        if self.finish_reason:
            self._tell(len(self.output_ids))

    def turn(self) -> Turn:
        """Return the whole turn."""
        assert self._oldest is not None
        return Turn(
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            spans=_joined(self._spans),
            oldest=str(min([self._oldest, *(version for version, _, _ in self._spans)])),
            finish_reason=self.finish_reason,
            temperature=self._params.get("temperature"),
            is_steered=is_steered(self._params),
            top_logprobs=self.top_logprobs if BESIDE in self._params else None,
            images=[ref_of(image) for image in self.images],
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    def _count_prompt(self, meta: MetaInfo) -> None:
        num_prompt_tokens = len(self.prompt_ids) + self._stream_start
        num_cached_tokens = min(max(0, meta.cached_tokens), num_prompt_tokens)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self._server.num_prompt_tokens += num_prompt_tokens
        self._server.num_cached_tokens += num_cached_tokens

    def _check_images(self, meta: MetaInfo) -> None:
        """Hold the server's count of the prompt against ours: another one means that it has resized what it was sent.

        Raises:
            GenerationError: they differ.
        """
        need = len(self.prompt_ids) + self._stream_start
        if meta.prompt_tokens != need:
            raise GenerationError(
                f"images: server {self._server.id} counts {meta.prompt_tokens} tokens in a prompt of {need}: it sees "
                "images in other sizes than the model's folder says; have it read the same image processor's settings"
            )

    def _keep(self, num_tokens: int) -> None:
        """Forget all tokens but the first ``num_tokens``."""
        del self.output_ids[num_tokens:], self.logprobs[num_tokens:], self.top_logprobs[num_tokens:]
        kept = [(version, start, min(end, num_tokens)) for version, start, end in self._spans]
        self._spans = [span for span in kept if span[1] < span[2]]

    def _tell(self, num_certain: int) -> None:
        """Pass on the tokens up to ``num_certain`` that were not passed on before."""
        if self._on_tokens is not None and num_certain > self._num_told:
            self._on_tokens(self.output_ids[self._num_told : num_certain])
            self._num_told = num_certain

    def _exact_spans(self, *, is_finished: bool) -> list[tuple[Version, int, int]] | None:
        """Return the server's own spans, placed in the whole completion; None when it sent none."""
        spans = self._last_meta.weight_versions if self._last_meta else None
        if spans is None:
            return None
        num_tokens = len(self.output_ids) - self._stream_start
        edges = [0, *(span.end for span in spans)]
        covers = edges[-1] == num_tokens and all(
            span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False)
        )
        if not covers:
            if not is_finished:  # an early event's spans: what came after it has stamps only
                return None
            raise GenerationError(
                f"version spans: got {[(s.version, s.start, s.end) for s in spans]} over {num_tokens} tokens, "
                "need every token covered once"
            )
        try:
            return [
                (parse_version(span.version), span.start + self._stream_start, span.end + self._stream_start)
                for span in spans
                if span.end > span.start
            ]
        except ValueError as exc:
            raise GenerationError(str(exc)) from exc


def _possible(entries: TopLogprobs | None, num_tokens: int) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens at each of an event's positions, without those that could not come at all.

    Raises:
        ServerFault: there are fewer positions than tokens.
    """
    entries = entries or []
    if len(entries) < num_tokens:
        raise ServerFault(f"event of {num_tokens} tokens has {len(entries)} lists of top logprobs, need one each")
    return [[(id, logprob) for logprob, id, _ in at if logprob > IMPOSSIBLE] for at in entries[:num_tokens]]


def _joined(spans: list[tuple[Version, int, int]]) -> list[VersionSpan]:
    """Write neighbours of one version as one span."""
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span[0])]
    return [VersionSpan(version=str(run[0][0]), start=run[0][1], end=run[-1][2]) for run in runs]
