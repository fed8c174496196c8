"""The servers that requests may go to, and which one takes the next.

Invariants: a server is chosen only while it holds an announced weights version and nobody doubts it, and has at
most ``limit`` requests; the others wait here (``line``), and none waits while there is a place. A conversation stays
with its server, and siblings go where the first of them went, unless what others have there is more than
``MAX_IMBALANCE`` times the mean load. Who may change what: the fleet adds and removes; the supervisor admits, fences
and limits; a failed request only casts doubt, and the supervisor asks the server itself.
"""

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from areal_async.errors import GenerationError
from areal_async.inference.line import Line
from areal_async.process.bell import Bell
from areal_async.process.pausable_clock import PausableClock
from areal_async.telemetry import wait_graph

if TYPE_CHECKING:
    from areal_async.inference.siblings import Prefill

MAX_IMBALANCE = 1.15
"""Load of a server, over the mean of all, up to which it is preferred for what it has in its cache."""
MIN_ROOM_TOKENS = 7
"""SGLang, and the embedded engine as it does, refuses a prompt that leaves less of the context than this."""
KEPT_TOKENS = 2
"""Tokens of the context that no answer gets."""
STARTING = "starting"
"""Why nothing is sent to a server whose process is not ready yet."""


@dataclass(eq=False, slots=True)
class ServerHandle:
    """One inference server as the node knows it."""

    id: str
    url: str = ""
    admin_key: str = field(default="", repr=False)
    """The secret that it is administrated with; empty for one that needs none."""
    num_ranks: int = 1
    """GPUs it is spread over."""
    incarnation: str = ""
    """Another for each of its processes."""
    version: str = ""
    """The announced version it holds; empty before the first, and while it is fenced."""
    fence: str = STARTING
    """Why nothing is sent to it; empty while it serves."""
    failure: str = ""
    """The last such reason other than its start."""
    unreadable: str = ""
    """Why the files of the weights that it should hold cannot be loaded; empty once some were."""
    missed: str = ""
    """As ``ServerState.missed``."""
    doubt: str = ""
    """Why it is being asked whether it is well; empty when nobody doubts it."""
    is_silent: bool = False
    """It is doubted for having given nobody a token for as long as one stream may wait for its next."""
    doubted: anyio.Event = field(default_factory=anyio.Event)
    outstanding_tokens: int = 0
    """Prompt and largest possible answer of the requests it has."""
    total_tokens: int = 0
    """The same of all that it ever had; among servers that are equally loaded, the one that had least is next."""
    num_requests: int = 0
    limit: int = sys.maxsize
    """Requests it is sent at once."""
    context_tokens: int | None = None
    """Longest prompt and answer together; ``None`` where it has not said."""
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    """Tokens of the prompts that it has answered."""
    num_cached_tokens: int = 0
    """Those of them that it had in its cache, as it says."""
    num_first_tokens: int = 0
    """Streams that have given a token."""
    first_token_total_s: float = 0.0
    """Time from their requests to these tokens, summed."""
    num_swaps: int = 0
    """Weights versions that it was given."""
    swap_total_s: float = 0.0
    """Time for which swaps have paused it, summed."""
    wants_weights: bool = False
    """It holds no version and could take one now, and there is none that it can load."""
    card: str = ""
    """As ``ServerState.card``."""
    is_held: bool = False
    """It changes its weights in place; what was sent to it now would run on what is left of the old ones."""
    prefilling: set[asyncio.Event] = field(default_factory=set)
    """What requests wait for that are held back for their siblings' sake (``siblings``)."""

    @property
    def is_serviceable(self) -> bool:
        return not self.fence and not self.doubt

    @property
    def has_place(self) -> bool:
        return self.is_serviceable and not self.is_held and self.num_requests < self.limit


@dataclass(eq=False, slots=True)
class SiblingGroup:
    """What the requests of one group have in common."""

    number: int = 0
    """As ``Ticket.number``."""
    server: ServerHandle | None = None
    """Where the last one went that did not go on with a conversation there."""
    outstanding_tokens: Counter[ServerHandle] = field(default_factory=Counter)
    """Theirs of ``ServerHandle.outstanding_tokens``."""
    prefill: "Prefill | None" = None
    """The first of them at ``server``."""


Wanted = tuple[ServerHandle | None, int, SiblingGroup | None]
"""The preferred server, the tokens that a place is for, and whose they are."""


class ServerPool:
    """All servers of one node."""

    def __init__(self, server_ids: list[str], *, deadline_s: float) -> None:
        self.servers = {server_id: ServerHandle(server_id) for server_id in server_ids}
        self.clock = PausableClock()
        """What deadlines of generation go by: it stands while all servers are held up on purpose."""
        self._deadline_s = deadline_s
        self._num_tokens_of_gone = 0
        self._changed = Bell()
        self._waiters = Line[ServerHandle, Wanted]()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiters)

    @property
    def hindrance(self) -> ServerHandle | None:
        """One of the servers while none of them is serviceable; None when one is, or there is none."""
        is_held_up = not any(one.is_serviceable for one in self.servers.values())
        return next(iter(self.servers.values()), None) if is_held_up else None

    @property
    def num_generated_tokens(self) -> int:
        """By all servers there ever were: only grows."""
        return self._num_tokens_of_gone + sum(one.num_generated_tokens for one in self.servers.values())

    def add(self, server_id: str, *, num_ranks: int = 1) -> ServerHandle:
        """Take in one more server, fenced until it is admitted."""
        assert server_id not in self.servers
        server = self.servers[server_id] = ServerHandle(server_id, num_ranks=num_ranks)
        return server

    def remove(self, server: ServerHandle, reason: str) -> None:
        """Forget a server. Requests that have a place on it still give it back."""
        del self.servers[server.id]
        self._num_tokens_of_gone += server.num_generated_tokens
        self.fence(server, reason)

    def admit(self, server: ServerHandle, *, url: str, version: str) -> None:
        """Send requests to this server: it holds ``version``, verified."""
        server.url, server.version = url, version
        server.fence = server.doubt = server.unreadable = server.missed = ""
        server.is_held = server.wants_weights = server.is_silent = False
        _end_holds(server)
        self._notify()

    def hold(self, server: ServerHandle) -> None:
        """Keep new requests back, until the server is admitted with another version."""
        server.is_held = True
        _end_holds(server)

    def fence(self, server: ServerHandle, reason: str) -> None:
        """Send nothing more to this server, until it is admitted again."""
        server.fence, server.doubt, server.version = reason, "", ""
        if reason != STARTING:
            server.failure = reason
        server.is_held = server.wants_weights = server.is_silent = False
        _end_holds(server)
        self._notify()

    def cast_doubt(self, server: ServerHandle, reason: str, *, is_silent: bool = False) -> None:
        """Report a failed request: nothing more goes there until the supervisor has looked."""
        server.is_silent |= is_silent and not server.fence
        if server.is_serviceable:
            server.doubt = reason
            server.doubted.set()
            _end_holds(server)

    def clear_doubt(self, server: ServerHandle) -> None:
        """Go on using a server that was doubted and is well."""
        server.doubt = ""
        server.is_silent = False
        server.doubted = anyio.Event()
        self._notify()

    def set_limit(self, server: ServerHandle, limit: int) -> None:
        """Send this server at most ``limit`` requests at once; those it has beyond that run to their end."""
        server.limit = limit
        self._call_waiters()

    async def choose(
        self, preferred: ServerHandle | None = None, *, cost_tokens: int = 0, group: SiblingGroup | None = None
    ) -> ServerHandle:
        """Take a place on the preferred server, else the group's, else the least loaded; wait while there is none.

        A server that has no place is passed over, and so is one on which others' load is more than ``MAX_IMBALANCE``
        times the mean. Give the place back with ``release``.

        Raises:
            GenerationError: no server was serviceable when the deadline was over. The wait for a place has no
                deadline here; the caller's episode has.
        """
        wanted = preferred, cost_tokens, group
        server = None if self._waiters else self._take(*wanted)
        while server is None:
            place: asyncio.Future[ServerHandle] = asyncio.get_running_loop().create_future()
            waiter = self._waiters.join(place, wanted, number=group.number if group is not None else None)
            self._call_waiters()  # where it was called to a server that has gone, another one may have a place
            try:
                with wait_graph.on(wait_graph.server(self._name_one(preferred)), "a place on"):
                    await self._wait(place)
                server = place.result() if place.result().is_serviceable else None
            finally:
                if not place.done():
                    self._waiters.leave(waiter)
                elif server is None:  # its server was fenced since, or who waited was cancelled
                    self.release(place.result(), cost_tokens=cost_tokens, group=group)
        return server

    def release(self, server: ServerHandle, *, cost_tokens: int = 0, group: SiblingGroup | None = None) -> None:
        """Give a place back, with the ``cost_tokens`` and the group it was taken for."""
        server.num_requests -= 1
        server.outstanding_tokens -= cost_tokens
        if group is not None:
            group.outstanding_tokens[server] -= cost_tokens
        if server.fence and not server.num_requests:
            self._notify()
        else:
            self._call_waiters()

    async def wait_serviceable(self) -> None:
        """Wait, without a deadline of its own, until some server may be chosen."""
        while not any(server.is_serviceable for server in self.servers.values()):
            await self._changed.wait()

    async def wait_empty(self, server: ServerHandle) -> None:
        """Wait until a fenced server has no request left."""
        while server.num_requests:
            await self._changed.wait()

    async def _wait(self, place: asyncio.Future[ServerHandle]) -> None:
        """Wait until there is a place; one that comes together with a cancellation is the caller's to give back."""
        while not place.done():
            await self.clock.wait([place], self._deadline_s)
            if not place.done() and not any(one.is_serviceable for one in self.servers.values()):
                states = ", ".join(f"{one.id} ({one.fence or one.doubt})" for one in self.servers.values())
                raise GenerationError(
                    f"no inference server within {self._deadline_s:g} s: {states or 'the node has none'}"
                )

    def _name_one(self, preferred: ServerHandle | None) -> str:
        """Name the server that a request waits for most."""
        named = preferred or min(self.servers.values(), key=lambda one: one.outstanding_tokens, default=None)
        return named.id if named is not None else "of this node"

    def _take(
        self, preferred: ServerHandle | None, cost_tokens: int, group: SiblingGroup | None
    ) -> ServerHandle | None:
        server = preferred or (group.server if group is not None else None)
        if server is None or not server.has_place or self._is_ahead(server, group):
            free = (one for one in self.servers.values() if one.has_place)
            server = min(free, key=lambda one: (one.outstanding_tokens, one.total_tokens), default=None)
        if server is not None:
            server.num_requests += 1
            server.outstanding_tokens += cost_tokens
            server.total_tokens += cost_tokens
            if group is not None:
                group.outstanding_tokens[server] += cost_tokens
                if server is not preferred:
                    group.server = server
        return server

    def _is_ahead(self, server: ServerHandle, group: SiblingGroup | None) -> bool:
        """Say whether others' load on a server is too far above the mean; a group alone is never torn apart."""
        own = group.outstanding_tokens if group is not None else Counter[ServerHandle]()
        serving = [one for one in self.servers.values() if one.is_serviceable and not one.is_held]
        others_tokens = sum(one.outstanding_tokens - own[one] for one in serving)
        return (server.outstanding_tokens - own[server]) * len(serving) > MAX_IMBALANCE * others_tokens

    def _call_waiters(self) -> None:
        while self._waiters:
            server = self._take(*self._waiters.first.wanted)
            if server is None:
                return
            self._waiters.pop().place.set_result(server)

    def _notify(self) -> None:
        self._changed.ring()
        self._call_waiters()


def _end_holds(server: ServerHandle) -> None:
    """Let requests go that wait for a sibling's first token there."""
    while server.prefilling:
        server.prefilling.pop().set()
