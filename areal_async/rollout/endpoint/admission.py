"""What a node's endpoint takes on at once: requests of a trajectory, bytes of their bodies, and how long one may come.

A trajectory has its share of everything, so that one that asks too much waits for itself; a short request waits for no
room. Invariant: what a request has taken it gives back when it ends, however it ends.
"""

import asyncio
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from areal_async.process.http_server import HEAD_DEADLINE_S, MAX_CONNECTIONS
from areal_async.rollout.endpoint.refusals import Refusal

CONNECTIONS_PER_SESSION = 4
"""All connections over those that one trajectory's requests may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """How much at once, and how long."""

    max_running: int = 256
    """Requests of one trajectory that are answered at once; others wait."""
    max_admitted: int = 1024
    """Requests of one trajectory that are answered or wait; others are told when to come again."""
    retry_after_s: int = 10
    """Mean time: all that were refused at once are not to come again at once."""
    max_body_bytes: int = 16 << 20
    """Twice the largest trajectory that is stored."""
    max_short_bytes: int = 64 << 10
    """A body of so many waits for no room; the server has as many at hand for each connection."""
    max_held_bytes: int = 256 << 20
    """Size of all longer bodies that are held, from their beginnings to the ends of their answers."""
    max_share_bytes: int = 32 << 20
    """Size of those of them that are one trajectory's."""
    body_deadline_s: float = 60.0
    head_deadline_s: float = HEAD_DEADLINE_S
    max_connections: int = MAX_CONNECTIONS

    @classmethod
    def of_process(cls) -> Self:
        """Return the usual ones, less connections where the process may open few files: it needs others as well."""
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files == resource.RLIM_INFINITY or num_files >= 2 * MAX_CONNECTIONS:
            return cls()
        num_connections = num_files // 2
        num_admitted = min(cls().max_admitted, num_connections // CONNECTIONS_PER_SESSION)
        return cls(max_connections=num_connections, max_admitted=num_admitted)

    def draw_retry_after(self) -> int:
        """Return the seconds after which a client that was refused may come again."""
        return random.randint(max(1, self.retry_after_s // 2), self.retry_after_s * 3 // 2)


class BodyBudget:
    """The bytes of long bodies that are held, and who waits to hold more: first come, first served, within a share."""

    def __init__(self, limits: AdmissionLimits) -> None:
        assert limits.max_body_bytes <= limits.max_share_bytes <= limits.max_held_bytes
        self.limits = limits
        self._held: Counter[str] = Counter()
        """Owner -> bytes."""
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @property
    def num_held_bytes(self) -> int:
        """Bytes that are spoken for."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        """Bodies that are to be read once there is room."""
        return len(self._waiting)

    @asynccontextmanager
    async def holding(self, owner: str, num_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Wait for room for a body, and hold it; yield what makes it less, once it is known to be."""
        held = 0 if num_bytes <= self.limits.max_short_bytes else num_bytes

        def shrink(num_bytes: int) -> None:
            nonlocal held
            if num_bytes < held:
                self._give_back(owner, held - num_bytes)
                held = num_bytes

        if not held:
            yield shrink
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = owner, num_bytes
        try:
            self._admit()
            await turn
            yield shrink
        finally:
            # Once it was its turn it holds something, whether it has heard of it or not.
            self._give_back(owner, 0 if self._waiting.pop(turn, None) else held)

    def _give_back(self, owner: str, num_bytes: int) -> None:
        self._held[owner] -= num_bytes
        self._held += Counter()  # owners without any go
        self._admit()

    def _admit(self) -> None:
        left = self.limits.max_held_bytes - self.num_held_bytes
        for turn, (owner, num_bytes) in list(self._waiting.items()):
            if self._held[owner] + num_bytes > self.limits.max_share_bytes:
                continue  # it waits for its own
            if num_bytes > left:
                break
            del self._waiting[turn]
            self._held[owner] += num_bytes
            left -= num_bytes
            if not turn.done():
                turn.set_result(None)


def announced_bytes(scope: Scope, limits: AdmissionLimits) -> int:
    """Return how long a request's body is going to be, at most.

    Raises:
        Refusal: too long.
    """
    headers = Headers(scope=scope)
    if "content-length" not in headers:
        return limits.max_body_bytes if "transfer-encoding" in headers else 0
    num_bytes = int(headers["content-length"])
    if num_bytes > limits.max_body_bytes:
        raise _too_large(limits)
    return num_bytes


async def read_body(receive: Receive, limits: AdmissionLimits) -> bytes | None:
    """Return the body of a request; None where the client has left.

    Raises:
        Refusal: it is too long, or too slow to come.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.body_deadline_s):
            while (message := await receive())["type"] != "http.disconnect":
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                if num_bytes > limits.max_body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        message_text = f"request: its body has not come within {limits.body_deadline_s:g} s, send it at once"
        raise Refusal("too_slow", message_text) from None
    return None


def _too_large(limits: AdmissionLimits) -> Refusal:
    return Refusal("too_large", f"request: got more than {limits.max_body_bytes >> 20} MiB")
