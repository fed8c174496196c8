"""Tool calls in a reply, found by the serving engine's own parser: SGLang's route ``/parse_function_call``.

The server that said the reply is asked while it serves, else any other: the parser needs no place among those that
generate. What SGLang's parsers make of a call that is none is theirs: it stays a text, and nobody is told.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
import structlog

from areal_async.errors import GenerationError
from areal_async.inference.faults import RefusalFault, ServerFault
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.telemetry import wait_graph

MAX_TRIES = 3
PARSE_DEADLINE_S = 30.0

log = structlog.get_logger()


class FoundCall(msgspec.Struct, frozen=True):
    """One call, as the server has read it."""

    name: str
    parameters: str
    """Arguments of the call, as JSON."""


class FoundCalls(msgspec.Struct, frozen=True):
    """A reply, as the server has taken it apart."""

    normal_text: str
    calls: list[FoundCall]


class EngineCallParser:
    """Asks the servers of a pool."""

    def __init__(self, pool: ServerPool, http: httpx.AsyncClient, *, name: str) -> None:
        """Take SGLang's name of the parser."""
        self._pool = pool
        self._http = http
        self._name = name

    async def find(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, preferred: ServerHandle | None = None
    ) -> FoundCalls:
        """Return the calls in a reply and the text beside them.

        Raises:
            GenerationError: a server refused, or none answered.
        """
        cause = ""
        for _ in range(MAX_TRIES):
            server = await self._choose(preferred)
            api = ServerApi(self._http, server.url)
            try:
                with wait_graph.on(wait_graph.server(server.id), "the tool calls from"):
                    answer = await api.parse_calls(text, tools, parser=self._name, deadline_s=PARSE_DEADLINE_S)
                return msgspec.convert(answer, FoundCalls)
            except RefusalFault as exc:
                raise GenerationError(f"tool calls: {server.id} refused: {exc}") from exc
            except msgspec.ValidationError as exc:
                raise GenerationError(f"tool calls: {server.id} answered {str(answer)[:200]}: {exc}") from exc
            except ServerFault as exc:
                cause = str(exc)
                log.warning("calls.not_parsed", server_id=server.id, cause=cause)
                self._pool.cast_doubt(server, cause)
        raise GenerationError(f"tool calls: {MAX_TRIES} tries without an answer, the last one: {cause}")

    async def _choose(self, preferred: ServerHandle | None) -> ServerHandle:
        if preferred is not None and preferred.is_serviceable:
            return preferred
        server = await self._pool.choose()
        self._pool.release(server)
        return server
