"""A connection without requests, or whose client does not read, is closed by its deadline; there are only so many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import create_server

import anyio
import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from areal_async.process.http_server import ConnectionLimits, serve_app
from tests.brokers import until

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nhost"
WHOLE = GET.replace(b"/", b"/whole", 1)
PIECES = GET.replace(b"/", b"/pieces", 1)
CLOSED = WHOLE.replace(b"host", b"connection: close\r\nhost", 1)
NUM_LONG_BYTES = 24 << 20
"""More than the sockets at both ends hold."""
PIECE_BYTES = 64 << 10
PATIENCE_S = 60.0
SHORT_S = 1.0
NEVER_S = 10_000.0


class Site:
    """A server whose answers wait to be let go of, and its clients."""

    def __init__(self, port: int, connections: set[object]) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = connections
        self.num_asked = 0
        self.num_answered = 0
        self.is_open = asyncio.Event()

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await until(lambda: not self.connections)


@asynccontextmanager
async def site(limits: ConnectionLimits, *, is_open: bool = True, keep_alive_s: float = NEVER_S) -> AsyncIterator[Site]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        place.num_asked += 1
        await place.is_open.wait()
        length = str(2 if scope["path"] == "/" else NUM_LONG_BYTES + 2).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        for _ in range(NUM_LONG_BYTES // PIECE_BYTES if scope["path"] == "/pieces" else 0):
            await send({"type": "http.response.body", "body": bytes(PIECE_BYTES), "more_body": True})
        filling = bytes(NUM_LONG_BYTES if scope["path"] == "/whole" else 0)
        await send({"type": "http.response.body", "body": filling + b"ok"})
        place.num_answered += 1

    with create_server(("127.0.0.1", 0)) as listening:
        server, serving = serve_app(app, listening, limits=limits, timeout_keep_alive=keep_alive_s)
        place = Site(listening.getsockname()[1], server.server_state.connections)  # type: ignore[arg-type]
        if is_open:
            place.is_open.set()
        try:
            with anyio.fail_after(PATIENCE_S):
                yield place
                await place.close()
        finally:
            server.should_exit = True
            await asyncio.wait([serving])


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\nok")


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Return what came before the connection was closed."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half"])
async def test_connection_on_which_no_head_ends_is_closed(sent: bytes) -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S)) as place:
        reader, _ = await place.connect(sent)

        assert await read_end(reader) == b""


async def test_next_request_on_a_connection_has_a_deadline_too() -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S)) as place:
        reader, writer = await place.connect(GET)
        await read_answer(reader)
        writer.write(HALF)

        assert await read_end(reader) == b""


async def test_half_a_request_behind_a_whole_one_has_a_deadline_too() -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S)) as place:
        reader, _ = await place.connect(GET + HALF)
        await read_answer(reader)

        assert await read_end(reader) == b""


async def test_connection_that_is_answered_or_idle_is_not_closed_by_it() -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S), is_open=False) as place:
        asked, _ = await place.connect(GET)
        await until(lambda: place.num_asked == 1)
        halves = [await place.connect(HALF)]
        await read_end(halves[0][0])  # a deadline that began later is over
        place.is_open.set()
        await read_answer(asked)

        idle, writer = await place.connect(GET)
        await read_answer(idle)
        halves.append(await place.connect(HALF))
        await read_end(halves[1][0])
        writer.write(GET)
        await read_answer(idle)


async def test_rest_of_a_request_that_was_answered_before_its_end_is_not_waited_for() -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S)) as place:
        reader, _ = await place.connect(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234")
        await read_answer(reader)

        assert await read_end(reader) == b""


async def test_connection_goes_on_once_the_rest_has_come() -> None:
    async with site(ConnectionLimits(head_deadline_s=SHORT_S)) as place:
        reader, writer = await place.connect(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234")
        await read_answer(reader)
        writer.write(b"56789")
        half, _ = await place.connect(HALF)
        await read_end(half)
        writer.write(GET)

        await read_answer(reader)


async def test_connection_that_is_idle_once_the_rest_has_come_is_closed_as_any_other() -> None:
    async with site(ConnectionLimits(head_deadline_s=NEVER_S), keep_alive_s=SHORT_S) as place:
        reader, writer = await place.connect(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234")
        await read_answer(reader)
        writer.write(b"56789")

        assert await read_end(reader) == b""


@pytest.mark.parametrize("sent", [PIECES, pytest.param(CLOSED, marks=pytest.mark.nightly)], ids=["pieces", "closed"])
async def test_client_that_does_not_read_its_answer_keeps_no_place(sent: bytes) -> None:
    async with site(ConnectionLimits(unread_deadline_s=SHORT_S)) as place:
        with capture_logs() as lines:
            await place.connect(sent)
            await until(lambda: place.num_asked == 1)

            await until(lambda: not place.connections and place.num_answered == 1)

        assert [line["event"] for line in lines] == ["http_server.unread"]


@pytest.mark.parametrize(
    "sent",
    [WHOLE, *(pytest.param(sent, marks=pytest.mark.nightly) for sent in (PIECES, CLOSED))],
    ids=["whole", "pieces", "closed"],
)
async def test_client_that_reads_slowly_has_all_of_its_answer(sent: bytes) -> None:
    limits = ConnectionLimits(head_deadline_s=SHORT_S, unread_deadline_s=SHORT_S)
    async with site(limits, keep_alive_s=SHORT_S) as place:
        slow, _ = await place.connect(sent)
        await place.connect(PIECES)
        num_left = NUM_LONG_BYTES + 2
        await slow.readuntil(b"\r\n\r\n")
        await until(lambda: place.num_asked == 2)
        while len(place.connections) > 1:  # its deadlines are over by then
            num_left -= len(await slow.read(PIECE_BYTES))
            await anyio.sleep(SHORT_S / 50)

        assert len(await slow.readexactly(num_left)) == num_left


async def test_longest_without_a_request_goes_where_there_are_too_many() -> None:
    limits = ConnectionLimits(max_connections=3, head_deadline_s=NEVER_S)
    async with site(limits, is_open=False) as place:
        await place.connect(GET)
        await until(lambda: place.num_asked == 1)
        first, _ = await place.connect(HALF)
        await until(lambda: len(place.connections) == 2)
        await place.connect()
        await until(lambda: len(place.connections) == 3)
        await place.connect(GET)

        assert await read_end(first) == b""
        await until(lambda: place.num_asked == 2)
        await place.connect(GET)
        await until(lambda: place.num_asked == 3)
        newest, _ = await place.connect(GET)
        assert await read_end(newest) == b"", "all others are being answered"
        assert (place.num_asked, len(place.connections)) == (3, 3)
        place.is_open.set()
