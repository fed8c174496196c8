"""A connection that is lost is made again, and what came to nothing meanwhile is closed."""

import asyncio
from contextlib import suppress
from urllib.parse import urlparse

import anyio
import pytest

from areal_async.bus import Role, open_bus
from areal_async.config.settings import Settings
from areal_async.process.host import LOOPBACK
from tests.brokers import running_broker, until

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


class Relay:
    """Passes on what it is given, or takes connections in and says nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing: list[asyncio.StreamWriter] = []
        self.is_mute = False
        self.num_unheard = 0
        self.num_unheard_left = 0

    def fall_silent(self) -> None:
        self.is_mute = True
        for writer in self._passing:
            writer.close()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_mute:
            self.num_unheard += 1
            with suppress(ConnectionError):
                await reader.read()
            self.num_unheard_left += 1
            writer.close()
            return
        from_broker, to_broker = await asyncio.open_connection(LOOPBACK, self._port)
        self._passing += [writer, to_broker]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass_on, reader, to_broker)
            tasks.start_soon(self._pass_on, from_broker, writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()


async def test_a_try_that_nobody_answers_leaves_no_connection_behind(settings: Settings) -> None:
    async with running_broker(settings) as broker:
        relay = Relay(urlparse(broker.url).port or 0)
        async with await asyncio.start_server(relay.take, LOOPBACK) as listening:
            url = f"nats://{LOOPBACK}:{listening.sockets[0].getsockname()[1]}"
            key = broker.credentials(Role.OPERATOR)
            async with open_bus(url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
                relay.fall_silent()
                await until(lambda: relay.num_unheard == 3)
                await until(lambda: relay.num_unheard_left == 2)
                relay.is_mute = False
                await until(lambda: relay.num_unheard_left == 3)
                await until(lambda: bus.connection.is_connected)
