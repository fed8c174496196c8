"""The bytes of a generation stream: server-sent events out of raw chunks, and SGLang's JSON out of events.

Events are split here, from bytes and per chunk rather than per line, since this is the only code that
runs for every event of every stream. Whatever a server sends, it ends in an event or in ``ServerFault``, and
what it never ends takes no more than ``MAX_EVENT_BYTES``.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_async.inference.faults import ServerFault

DONE = b"[DONE]"
MAX_EVENT_BYTES = 4 << 20

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Logprob = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
"""Within 32 bits: SGLang writes the smallest such number for what has no probability."""

IMPOSSIBLE = -3e38
"""Log-probability below which a token has none."""
TopLogprobs = list[list[tuple[Logprob, int, Any]]]
"""The likeliest tokens at each position, likeliest first, as (logprob, id, text)."""


class EventSplitter:
    """Cuts bytes into the data of events, wherever the chunks break."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that ``data`` completes.

        Raises:
            ServerFault: an event does not end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ServerFault(f"got {len(self._rest)} bytes of one event, need at most {MAX_EVENT_BYTES}")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


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
