"""The requests of one group, whose prompts begin alike: one server takes them, and computes that beginning once.

SGLang finds a prompt in its cache only once it is computed: of siblings that come together each would be computed. So
the others wait until the first one's first token. Invariant: none waits longer than ``HOLD_S``, nor for a first one
that has failed or was cancelled, nor for a server that changes its weights or is doubted. It is decided when and where
a request is sent, never what it asks for.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio

from areal_async.inference.pool import ServerHandle, SiblingGroup
from areal_async.telemetry import wait_graph

HOLD_S = 1.0

_group: ContextVar[SiblingGroup | None] = ContextVar("sibling_group", default=None)


@contextmanager
def requests_of(group: SiblingGroup | None) -> Iterator[None]:
    """Have the requests that are sent within be of this group; ``None`` for requests that have no siblings."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def current_group() -> SiblingGroup | None:
    """Return whose request it is that is being sent."""
    return _group.get()


class Prefill:
    """The first request of a group at one server, until its first token."""

    def __init__(self, server: ServerHandle, prompt_ids: list[int]) -> None:
        self._server = server
        self._version = server.version
        self._prompt_ids = prompt_ids
        self._over = asyncio.Event()
        server.prefilling.add(self._over)
        self.has_begun = False
        """It has given a token: the server has its prompt in its cache."""

    def begin(self) -> None:
        """Take note of its first token."""
        self.has_begun = True
        self.end()

    def end(self) -> None:
        """Let the others go."""
        self._over.set()
        self._server.prefilling.discard(self._over)

    def is_for(self, server: ServerHandle) -> bool:
        """Say whether it is under way, or has given tokens, where a request to ``server`` could use it."""
        is_known = self.has_begun or not self._over.is_set()
        return is_known and server is self._server and server.version == self._version

    async def wait(self, prompt_ids: list[int]) -> None:
        """Wait, for ``HOLD_S`` at most, until a prompt whose first half is this one's would find that cached."""
        half = len(prompt_ids) // 2
        if not self._over.is_set() and prompt_ids[:half] == self._prompt_ids[:half]:
            with (
                wait_graph.on(wait_graph.server(self._server.id), "a sibling's prompt on"),
                anyio.move_on_after(HOLD_S),
            ):
                await self._over.wait()


async def lead_or_wait(group: SiblingGroup, server: ServerHandle, prompt_ids: list[int]) -> Prefill | None:
    """Return what the caller has to begin and to end, as the first of its group there; ``None`` after it has waited."""
    if group.prefill is None or not group.prefill.is_for(server):
        group.prefill = Prefill(server, prompt_ids)
        return group.prefill
    await group.prefill.wait(prompt_ids)
    return None
