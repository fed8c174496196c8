"""Servers that are used as they are: one started here with the model's own weights, or what already runs somewhere.

For trying a workflow. Nothing follows announced weights and nothing is restarted: a caller of a server that fails is
told why it did. Invariant: before a server is sent anything it has said that its streams and versions are such as the
client reads; one that is merely OpenAI's kind of server is refused, since it gives no token ids.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import structlog

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.inference.commands import NO_VERSION, server_command
from areal_async.inference.http import TRANSPORT_ERRORS, ServerApi, context_tokens_of, decode_answer, make_client
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.servers import HEALTH_DEADLINE_S, ServerProcess
from areal_async.protocol.fields import is_version

NUM_CONNECTIONS = 16
ASK_DEADLINE_S = 10.0
LOST_DEADLINE_S = 10.0
"""Time for which a request waits for a failed server to recover."""
RECHECK_S = 1.0
OWN_ID = "own"
FLAGS = f"--incremental-streaming-output --weight-version {NO_VERSION}"
"""Options that SGLang has to be started with."""

log = structlog.get_logger()


class Facts(NamedTuple):
    """The answers of a server about itself."""

    url: str
    version: str
    tokenizer_path: str
    context_tokens: int | None


async def ask(client: httpx.AsyncClient, url: str) -> Facts:
    """Ask a server what it is.

    Raises:
        UserError: nobody is there, it is not SGLang's kind of server, or it streams what the client cannot read.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"server {url}: is no address, need one like http://127.0.0.1:30000")
    model = await _get(client, url, "/model_info")
    server = await _get(client, url, "/server_info")
    version = str(model.get("weight_version", ""))
    if not server.get("incremental_streaming_output") or not is_version(version):
        raise UserError(
            f"server {url}: was started with other flags than are needed to read its streams token by token "
            f"(weight version {version!r}); start it with {FLAGS}"
        )
    return Facts(url, version, str(model.get("tokenizer_path", "")), context_tokens_of(server))


async def _get(client: httpx.AsyncClient, url: str, route: str) -> dict[str, object]:
    try:
        response = await client.get(f"{url}{route}", timeout=httpx.Timeout(ASK_DEADLINE_S))
    except (*TRANSPORT_ERRORS, httpx.InvalidURL) as exc:
        cause = str(exc) or type(exc).__name__
        raise UserError(f"server {url}: cannot be reached: {cause}; start one there, or leave --server out") from exc
    answer = decode_answer(response.content) if response.status_code == 200 else {}
    if not answer:
        raise UserError(
            f"server {url}: answers {route} with status {response.status_code}, need a server with SGLang's routes; "
            "a plain OpenAI endpoint gives no token ids"
        )
    return answer


@asynccontextmanager
async def visited_servers(
    settings: Settings, urls: Sequence[str], *, log_path: Path
) -> AsyncIterator[tuple[ServerPool, list[Facts]]]:
    """Yield a pool of the servers at ``urls``, and what each says of itself.

    Args:
        urls: none for one server that is started here, as a node starts it, and ended with the block.
        log_path: of the server that is started here.

    Raises:
        UserError: one of them is not there or not to be used, or the one of ours cannot start.
    """
    pool = ServerPool([], deadline_s=LOST_DEADLINE_S)
    own = None if urls else ServerProcess(server_command(settings, server_id=OWN_ID, index=0), log_path=log_path)
    try:
        async with make_client(max_connections=NUM_CONNECTIONS) as client, anyio.create_task_group() as tasks:
            if own is not None:
                silence_s, bound_s = settings.inference.start_deadline_s, settings.inference.start_bound_s
                await own.start(ServerApi(client, ""), silence_s=silence_s, bound_s=bound_s)
                urls = [own.url]
            facts = [await ask(client, url) for url in urls]
            for fact in facts:
                server = pool.add(fact.url if own is None else OWN_ID)
                server.context_tokens = fact.context_tokens
                server.admin_key = "" if own is None else own.command.admin_key
                pool.set_limit(server, settings.inference.max_running_requests)
                pool.admit(server, url=fact.url, version=fact.version)
                tasks.start_soon(_clear_doubts, pool, server, ServerApi(client, fact.url))
                if own is not None:
                    tasks.start_soon(_fence_at_end, pool, server, own)
            yield pool, facts
            tasks.cancel_scope.cancel()
    finally:
        if own is not None:
            await own.stop()


async def _fence_at_end(pool: ServerPool, server: ServerHandle, process: ServerProcess) -> None:
    """Send nothing more to a server whose process has ended; a caller that waits for it is told its last words."""
    pool.fence(server, await process.wait_ended())
    log.warning("server.failed", server_id=server.id, reason=server.fence)


async def _clear_doubts(pool: ServerPool, server: ServerHandle, api: ServerApi) -> None:
    """Go on using a server that failed a request, whenever it says that it is well."""
    while True:
        await server.doubted.wait()
        if not server.fence and await api.is_healthy(deadline_s=HEALTH_DEADLINE_S):
            pool.clear_doubt(server)
        else:
            await anyio.sleep(RECHECK_S)
