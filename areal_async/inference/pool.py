"""The servers that requests may go to, and which one takes the next.

Invariant: a server is chosen only while it holds an announced weights version and nobody doubts it. Who
may change what: the supervisor admits and fences; a failed request only casts doubt, and the supervisor
asks the server itself.
"""

from dataclasses import dataclass, field

import anyio

from areal_async.errors import GenerationError


@dataclass(eq=False, slots=True)
class Server:
    """One inference server as the node knows it."""

    id: str
    url: str = ""
    version: str = ""
    """The announced version it holds; empty before the first."""
    fence: str = "starting"
    """Why nothing is sent to it; empty while it serves."""
    doubt: str = ""
    """Why it is being asked whether it is well; empty when nobody doubts it."""
    doubted: anyio.Event = field(default_factory=anyio.Event)
    outstanding_tokens: int = 0
    """Prompt and largest possible answer of the requests it has."""
    num_requests: int = 0
    num_generated_tokens: int = 0

    @property
    def is_serviceable(self) -> bool:
        return not self.fence and not self.doubt


class Pool:
    """All servers of one node."""

    def __init__(self, server_ids: list[str], *, deadline_s: float) -> None:
        self.servers = {server_id: Server(server_id) for server_id in server_ids}
        self._deadline_s = deadline_s
        self._changed = anyio.Event()

    def admit(self, server: Server, *, url: str, version: str) -> None:
        """Send requests to this server: it holds ``version``, verified."""
        server.url, server.version, server.fence, server.doubt = url, version, "", ""
        self._notify()

    def fence(self, server: Server, reason: str) -> None:
        """Send nothing more to this server, until it is admitted again."""
        server.fence, server.doubt, server.version = reason, "", ""
        self._notify()

    def cast_doubt(self, server: Server, reason: str) -> None:
        """Report a failed request: nothing more goes there until the supervisor has looked."""
        if server.is_serviceable:
            server.doubt = reason
            server.doubted.set()

    def clear_doubt(self, server: Server) -> None:
        """Go on using a server that was doubted and is well."""
        server.doubt = ""
        server.doubted = anyio.Event()
        self._notify()

    async def choose(self, preferred: Server | None = None) -> Server:
        """Return the preferred server while it is serviceable, else the least loaded; wait while there is none.

        Raises:
            GenerationError: none became serviceable within the deadline.
        """
        server = self._best(preferred)
        if server is not None:
            return server
        with anyio.move_on_after(self._deadline_s):
            while server is None:
                await self._changed.wait()
                server = self._best(preferred)
            return server
        states = ", ".join(f"{server.id} ({server.fence or server.doubt})" for server in self.servers.values())
        raise GenerationError(f"no inference server within {self._deadline_s:g} s: {states}")

    async def wait_serviceable(self) -> None:
        """Wait, without a deadline of its own, until some server may be chosen."""
        while not any(server.is_serviceable for server in self.servers.values()):
            await self._changed.wait()

    def _best(self, preferred: Server | None) -> Server | None:
        if preferred is not None and preferred.is_serviceable:
            return preferred
        serviceable = (server for server in self.servers.values() if server.is_serviceable)
        return min(serviceable, key=lambda server: server.outstanding_tokens, default=None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
