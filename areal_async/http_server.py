"""An HTTP server inside a process that has signals, an event loop and logs of its own."""

import contextvars
from asyncio import AbstractEventLoop, Task
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import Any

import structlog
import uvicorn

SHUTDOWN_GRACE_S = 1

log = structlog.get_logger()


class GuestServer(uvicorn.Server):
    """Uvicorn that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take hold of none."""
        yield


def serve_app(
    app: Any, listening: socket, *, loop: AbstractEventLoop, **options: Any
) -> tuple[GuestServer, "Task[None]"]:
    """Start to serve an ASGI application; return the server, to be told ``should_exit``, and its task.

    Args:
        options: of ``uvicorn.Config``, beside those that make it a guest.
    """
    server = GuestServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            loop="none",
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            **options,
        )
    )
    # Whoever happens to start it must not lend its context's names to all that it serves.
    task = loop.create_task(server.serve(sockets=[listening]), context=contextvars.Context())
    task.add_done_callback(_report)
    return server, task


def _report(serving: "Task[None]") -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.error("http_server.ended", cause=f"{type(error).__name__}: {error}")
