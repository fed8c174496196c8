"""A relay before a server that lets a client have the beginning of each answer, and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio

STREAMED, EVENT = b"POST /generate ", b"data:"
NUM_EVENTS = 2


@asynccontextmanager
async def only_beginnings(url: str) -> AsyncIterator[str]:
    """Yield the address of a relay to the server at ``url``.

    Of an answer that is streamed it passes the first events on and holds the others back, however fast the server is:
    the client is in the midst of it until the server has gone. All else is passed on as it comes, while there is
    somebody to have it: uvloop lets nobody write to a connection that it has closed.
    """
    where = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_streamed = False

        async def ask() -> None:
            nonlocal is_streamed
            while (piece := await reader.read(1 << 16)) and not to_server.is_closing():
                is_streamed = is_streamed or STREAMED in piece
                to_server.write(piece)
            tasks.cancel_scope.cancel()

        async def answer() -> None:
            num_events = 0
            while (piece := await from_server.read(1 << 16)) and not writer.is_closing():
                if is_streamed and num_events >= NUM_EVENTS:
                    continue
                num_events += piece.count(EVENT)
                writer.write(piece)
            tasks.cancel_scope.cancel()

        try:
            from_server, to_server = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            writer.close()
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                tasks.start_soon(answer)
        except* OSError:
            pass  # either end has gone, and so does the other
        finally:
            to_server.close()
            writer.close()

    relay = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = relay.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        relay.close()
