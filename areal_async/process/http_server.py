"""An HTTP server inside a process that has signals, an event loop and logs of its own, and other uses for its files.

A connection is for requests: one on which none comes is closed by a deadline, and earlier where there are too many; so
is one whose client reads nothing of what is to be sent to it.
"""

import asyncio
import contextvars
import fcntl
import math
import struct
import termios
from asyncio import Task, TimerHandle, Transport
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SHUTDOWN_GRACE_S = 1
HEAD_DEADLINE_S = 20.0
UNREAD_DEADLINE_S = 600.0
MAX_CONNECTIONS = 8192

log = structlog.get_logger()


class GuestServer(uvicorn.Server):
    """Uvicorn that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take hold of none."""
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """How many connections a server has, and how long one stays open without a request."""

    max_connections: int = MAX_CONNECTIONS
    head_deadline_s: float = HEAD_DEADLINE_S
    """Time from connecting, or from the first byte of a later request, to the end of the request's head."""
    unread_deadline_s: float = UNREAD_DEADLINE_S
    """Time in which a client must take in something of what waits for it, at the latest within twice as long."""


class PunctualProtocol(H11Protocol):
    """HTTP/1.1 whose clients have a deadline for the head of a request, and one to read on.

    Who answers waits while too much waits for the client; a slow one that reads on is waited for, one that does not
    loses the connection, and with it its place.

    A connection that was used and is idle has uvicorn's ``timeout_keep_alive``. Where there are too many connections
    the one goes that has waited longest without a request; where all have one, the newest.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, unserved: dict["PunctualProtocol", None], **options: Any
    ) -> None:
        """Take ``unserved`` as the server's connections without a request to answer, longest waiting first."""
        super().__init__(*args, **options)
        self._limits = limits
        self._unserved = unserved
        self._deadline: TimerHandle | None = None
        self._next_look: TimerHandle | None = None
        self._num_unread_bytes = math.inf
        """At the last look, where something waited for the client since."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._unserved[self] = None
        self._start_deadline()
        self._look_later()
        if len(self.connections) > self._limits.max_connections:
            longest = next(iter(self._unserved))
            del self._unserved[longest]  # it hears of its end only later
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        super().connection_lost(exc)
        self._unserved.pop(self, None)
        self._end_deadline()
        if self._next_look is not None:
            self._next_look.cancel()
        self._unset_keepalive_if_required()

    def resume_writing(self) -> None:
        """Have who answers go on: the client has read."""
        super().resume_writing()
        self._num_unread_bytes = math.inf

    def data_received(self, data: bytes) -> None:
        """Take in a piece of a request."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Expect the next request, of which a part may have come already."""
        super().on_response_complete()
        self._note_state()

    def timeout_keep_alive_handler(self) -> None:
        """Close what was not used again, once its client has read what is left."""
        self.transport.close()

    def _note_state(self) -> None:
        if self.transport.is_closing():
            self._end_deadline()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._unserved.pop(self, None)
            self._end_deadline()
            return
        self._unserved.setdefault(self)
        if self.cycle is None or self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            self._start_deadline()  # the rest of a request that was answered before its end has one as well
            return
        self._end_deadline()
        if self.timeout_keep_alive_task is None:  # data ends it, even the last of a request that is answered already
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.head_deadline_s, self.transport.abort)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_later(self) -> None:
        self._next_look = self.loop.call_later(self._limits.unread_deadline_s, self._look)

    def _look(self) -> None:
        """End the connection where something waits for the client, which has read nothing since the last look."""
        self._look_later()
        before, is_closing = self._num_unread_bytes, self.transport.is_closing()
        self._num_unread_bytes = self._count_unread() if self.flow.write_paused or is_closing else math.inf
        if before <= self._num_unread_bytes < math.inf:
            log.warning("http_server.unread", client=self.client, num_bytes=before)
            self.transport.abort()
        elif is_closing:
            self._unserved.setdefault(self)  # nobody answers it any more: it goes where there are too many

    def _count_unread(self) -> int:
        """Return the bytes that the client's host has not taken in: here, and in the kernel, of a slow one the most."""
        num_bytes = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # not every kernel tells, and no closed socket
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += struct.unpack("i", queued)[0]
        return num_bytes


def serve_app(
    app: Any, listening: socket, *, limits: ConnectionLimits | None = None, **options: Any
) -> tuple[GuestServer, "Task[None]"]:
    """Start to serve an ASGI application here; return the server, to be told ``should_exit``, and its task.

    Args:
        options: of ``uvicorn.Config``, beside those that make it a guest.
    """
    protocol: Any = partial(PunctualProtocol, limits=limits or ConnectionLimits(), unserved={})
    server = GuestServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            loop="none",
            ws="none",
            http=protocol,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            **options,
        )
    )
    # The task that happens to start it must not lend its context's names to all that is served.
    task = asyncio.create_task(server.serve(sockets=[listening]), context=contextvars.Context())
    task.add_done_callback(_report)
    return server, task


def _report(serving: "Task[None]") -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.error("http_server.ended", cause=f"{type(error).__name__}: {error}")
