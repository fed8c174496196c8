"""The streams that bring completions: from a request to the events in its answer, each handed to its completion.

Deadlines are set between events. Events are split here, from bytes and per chunk rather than per line, since this is
the code that runs for every event of every stream. Whatever a server sends, it ends in an event or in
``ServerFault``, and what it never ends takes no more than ``MAX_EVENT_BYTES``.
"""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

import anyio
import httpx
import msgspec
import structlog

from areal_async.config.settings import InferenceSettings
from areal_async.inference.completion import Completion
from areal_async.inference.faults import ServerFault, SilenceFault
from areal_async.inference.http import TRANSPORT_ERRORS, ServerApi, StreamClient, refusal
from areal_async.inference.pool import ServerHandle
from areal_async.inference.request import image_data
from areal_async.process import side_threads
from areal_async.process.pausable_clock import PausableClock
from areal_async.telemetry import spans, tracing, wait_graph
from areal_async.telemetry.wait_graph import Wait

DONE = b"[DONE]"
MAX_EVENT_BYTES = 4 << 20
DEADLINE_SLACK = 0.1
"""Share of the deadline between two events by which it may be overrun."""
ABORT_DEADLINE_S = 2.0

log = structlog.get_logger()


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


class TokenStreams:
    """One request at a time for each completion that is under way, on the server that was chosen for it."""

    def __init__(
        self,
        generation: StreamClient,
        administration: httpx.AsyncClient,
        settings: InferenceSettings,
        clock: PausableClock,
    ) -> None:
        """Take the clock that deadlines go by."""
        self._generation = generation
        self._administration = administration
        self._settings = settings
        self._clock = clock

    async def receive(
        self, server: ServerHandle, completion: Completion, *, on_begun: Callable[[], None] | None = None
    ) -> None:
        """Receive as much of the completion as one stream gives.

        Args:
            on_begun: called at the stream's first token.

        Raises:
            SilenceFault: the server has given no token to anybody since the last event, until that one's deadline.
            ServerFault: it broke otherwise; what was received is kept.
            GenerationError: the request itself is at fault.
        """
        images: dict[str, msgspec.Raw] = {}
        if completion.images:  # first: the version is noted, and the request made, as it is sent
            images["image_data"] = await side_threads.IMAGES.run(partial(image_data, completion.images))
        completion.begin_stream(server)
        request_id = os.urandom(16).hex()
        body = {
            "rid": request_id,
            # Prefixes cached under other weights are not for this request: an update in place cannot flush them.
            "cache_salt": server.version,
            **completion.request,
            **images,
            "return_logprob": True,
            "stream": True,
        }
        spans.note_stream(server.id, server.version, num_tokens=len(completion.output_ids))
        is_over = False
        try:
            with wait_graph.on(wait_graph.server(server.id), "a stream on") as wait:
                await self._receive(server, msgspec.json.encode(body), completion, wait, on_begun)
            is_over = True
        except TRANSPORT_ERRORS as exc:
            raise ServerFault(str(exc) or "connection lost") from exc
        finally:
            if not is_over:
                await self._abort(server, request_id)

    async def _receive(
        self,
        server: ServerHandle,
        body: bytes,
        completion: Completion,
        wait: Wait,
        on_begun: Callable[[], None] | None,
    ) -> None:
        splitter = EventSplitter()
        is_over = False
        now_s = asyncio.get_running_loop().time
        limit_s = self._settings.first_token_deadline_s
        renewed_until_s = 0.0
        num_tokens_of_all = server.num_generated_tokens
        asked_s = time.monotonic()  # a loop's own clock may go by milliseconds
        num_before, is_silent = len(completion.output_ids), True
        try:
            async with (
                self._clock.timeout(limit_s) as deadline,
                self._generation.post(f"{server.url}/generate", body, headers=tracing.headers()) as response,
            ):
                if response.status_code != 200:
                    raise refusal(response.status_code, await response.aread())
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for data in response.stream:
                    events = splitter.feed(data)
                    for event in events:
                        if event != DONE:
                            is_over = completion.add(event) or is_over
                    if events:
                        wait.moved()
                        if is_silent and len(completion.output_ids) > num_before:
                            is_silent = False
                            if on_begun is not None:
                                on_begun()
                            server.num_first_tokens += 1
                            server.first_token_total_s += time.monotonic() - asked_s
                        num_tokens_of_all = server.num_generated_tokens
                        limit_s = self._settings.between_tokens_deadline_s
                        due_s = now_s() + limit_s
                        if due_s > renewed_until_s:  # now and then: a timer moved at each event costs more than it
                            renewed_until_s = due_s + DEADLINE_SLACK * limit_s
                            deadline.renew(renewed_until_s - now_s())
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            if not is_over:
                kind = SilenceFault if server.num_generated_tokens == num_tokens_of_all else ServerFault
                raise kind(f"no event for {limit_s:g} s") from exc
        if not is_over:
            raise ServerFault("the stream ended early")

    async def _abort(self, server: ServerHandle, request_id: str) -> None:
        """Tell the server, as well as it can be done quickly, that nobody waits for this any more."""
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            try:
                api = ServerApi(self._administration, server.url, admin_key=server.admin_key)
                await api.abort(request_id, deadline_s=ABORT_DEADLINE_S)
            except ServerFault as exc:
                log.debug("stream.abort_failed", url=server.url, cause=str(exc))
