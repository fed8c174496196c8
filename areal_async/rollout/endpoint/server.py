"""A node's endpoint: one HTTP server for all its trajectories, on the node's own event loop.

It listens from the first ``open`` on, at a free port of the loopback, or of ``endpoint.host``; a node none of whose
workflows asks for it runs nothing. Signals are the node's own affair: the server never takes hold of them.
"""

import asyncio
import socket
from typing import Self

import anyio
import structlog

from areal_async.config.endpoint import EndpointSettings
from areal_async.process.host import LOOPBACK, check_address
from areal_async.process.http_server import ConnectionLimits, GuestServer, serve_app
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.rollout.endpoint.app import App
from areal_async.rollout.endpoint.reading import Unsupported
from areal_async.rollout.endpoint.session import Session

KEEP_ALIVE_S = 120
"""Longer than clients keep a connection that they do not use: none is closed under a request."""
BACKLOG = 2048
SHUTDOWN_DEADLINE_S = 3.0

log = structlog.get_logger()


class AgentEndpoint:
    """The sessions of a node and their server. An async context manager that ends both."""

    def __init__(self, settings: EndpointSettings | None = None, *, limits: AdmissionLimits | None = None) -> None:
        """Take ``None`` for the settings as they are where nothing is said, and for this process's limits."""
        settings = settings or EndpointSettings()
        self.limits = limits or AdmissionLimits.of_process()
        self._host = settings.host
        self.unsupported = Unsupported(settings.on_unsupported)
        """What its agents ask for and cannot have."""
        self._sessions: dict[str, Session] = {}
        self._app = App(self._sessions, self.limits)
        self._server: GuestServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._address = ""

    async def __aenter__(self) -> Self:
        """Check that it could listen.

        Raises:
            UserError: its address is none of this host's.
        """
        if self._host is not None:
            check_address(self._host, setting="endpoint.host")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for session in list(self._sessions.values()):
            self.close(session)
        if self.unsupported.counts:
            log.warning("endpoint.fields_left_out", num_times=dict(self.unsupported.counts))
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with anyio.move_on_after(SHUTDOWN_DEADLINE_S, shield=True):
            await asyncio.wait([self._serving])
        self._serving.cancel()
        self._server = self._serving = None

    @property
    def is_serving(self) -> bool:
        """Whether anything has been started."""
        return self._serving is not None

    def open(self, session: Session) -> str:
        """Serve a session from now on; return its base URL."""
        if self._serving is None:
            self._start()
        self._sessions[session.id] = session
        return f"{self._address}/{session.id}"

    def close(self, session: Session) -> None:
        """End a session's key and cancel its requests."""
        session.close()
        self._sessions.pop(session.id, None)

    def _start(self) -> None:
        host = self._host or LOOPBACK
        backlog = min(BACKLOG, self.limits.max_connections // 2)  # so many may be taken in beyond the limit, at once
        listening = socket.create_server((host, 0), backlog=backlog)
        self._address = f"http://{host}:{listening.getsockname()[1]}"
        self._server, self._serving = serve_app(
            self._app,
            listening,
            limits=ConnectionLimits(
                max_connections=self.limits.max_connections, head_deadline_s=self.limits.head_deadline_s
            ),
            backlog=backlog,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        log.info("endpoint.started", url=self._address)
