"""Three real servers as one cluster, each killed, started again or cut off from the others as a test likes."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from areal_async.bus import Bus, Role, open_bus
from areal_async.bus.accounts import accounts, key_path
from areal_async.bus.server import find_binary
from areal_async.config.settings import Settings
from areal_async.errors import BusError
from areal_async.process.host import LOOPBACK, free_port
from areal_async.protocol.subjects import Names
from tests.brokers import CONNECT_DEADLINE_S, until

NUM_SERVERS = 3
CHUNK_BYTES = 1 << 16
PROBE = "PROBE"


class Link:
    """What one server reaches another through; while it is not whole, nothing passes, as when a cable is pulled."""

    def __init__(self, to_port: int) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self.port = free_port(0, setting="a link")
        self._to_port = to_port
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(LOOPBACK, self._to_port)
        except OSError:
            writer.close()
            return
        for one, other in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.create_task(self._pass(one, other))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, RuntimeError):  # uvloop's, where the other end has been closed meanwhile
                while chunk := await reader.read(CHUNK_BYTES):
                    await self.whole.wait()
                    writer.write(chunk)
                    await writer.drain()
        finally:
            writer.close()


class Cluster:
    """The servers of one run, by number. Made by ``running_cluster``."""

    def __init__(self, directory: Path, names: Names) -> None:
        self.keys = directory / "keys"
        self._directory = directory
        self._names = names
        self._accounts = accounts(names, self.keys)
        self.ports = [free_port(0, setting="a server") for _ in range(NUM_SERVERS)]
        self.http_ports = [free_port(0, setting="a server's page") for _ in range(NUM_SERVERS)]
        self._route_ports = [free_port(0, setting="a route") for _ in range(NUM_SERVERS)]
        self._links = {
            (one, other): Link(self._route_ports[other])
            for one in range(NUM_SERVERS)
            for other in range(NUM_SERVERS)
            if one != other
        }
        self._processes: dict[int, anyio.abc.Process] = {}

    @property
    def url(self) -> str:
        """All addresses."""
        return ",".join(self.url_of(number) for number in range(NUM_SERVERS))

    def url_of(self, number: int) -> str:
        return f"nats://{LOOPBACK}:{self.ports[number]}"

    def seen_from(self, settings: Settings, *, replicas: int = NUM_SERVERS) -> Settings:
        """Return settings with where the cluster is, and with what it is shown."""
        page = f"http://{LOOPBACK}:{self.http_ports[0]}"
        bus = {"url": self.url, "credentials": self.keys, "monitor_url": page, "replicas": replicas}
        return settings.model_copy(update={"bus": settings.bus.model_copy(update=bus)})

    async def open_links(self) -> None:
        for link in self._links.values():
            await link.open()

    async def start(self, number: int, **jetstream: Any) -> None:
        folder = self._directory / f"server{number}"
        folder.mkdir(exist_ok=True)
        config = {
            "server_name": f"server{number}",
            "listen": f"{LOOPBACK}:{self.ports[number]}",
            "http": f"{LOOPBACK}:{self.http_ports[number]}",
            "max_payload": 9 << 20,
            "max_pending": 128 << 20,
            "jetstream": {"store_dir": str(folder), "sync_interval": "always", "max_file_store": 8 << 30, **jetstream},
            "cluster": {
                "name": "areal",
                "listen": f"{LOOPBACK}:{self._route_ports[number]}",
                "advertise": f"{LOOPBACK}:1",  # nobody is to reach it but through its links
                "pool_size": 1,
                "routes": [f"nats://{LOOPBACK}:{link.port}" for (one, _), link in self._links.items() if one == number],
            },
            "accounts": self._accounts,
        }
        (folder / "nats.conf").write_text(json.dumps(config))
        with (folder / "log").open("ab") as words:
            self._processes[number] = await anyio.open_process(
                [find_binary(), "-c", folder / "nats.conf"], stdin=subprocess.DEVNULL, stdout=words, stderr=words
            )

    async def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        await process.wait()

    @contextmanager
    def cut_off(self, number: int, *, of: int | None = None) -> Iterator[None]:
        """Cut a server off from the others, or from one ``of`` them, for the block; its clients still reach it."""
        mine = [link for pair, link in self._links.items() if number in pair and (of is None or of in pair)]
        for link in mine:
            link.whole.clear()
        try:
            yield
        finally:
            for link in mine:
                link.whole.set()

    async def leader_of(self, bus: Bus, stream: str) -> int:
        """Return the number of the server that leads a stream."""
        told = await bus.api.leader_info(stream)
        return int(told["cluster"]["leader"].removeprefix("server"))

    @asynccontextmanager
    async def connected(
        self, role: Role, *, at: int | None = None, operation_deadline_s: float = 60.0
    ) -> AsyncIterator[Bus]:
        """Connect a role; ``at`` one of the servers first."""
        async with open_bus(
            self.url if at is None else self.url_of(at),
            names=self._names,
            role=role,
            credentials=key_path(self.keys, role),
            connect_deadline_s=CONNECT_DEADLINE_S,
            operation_deadline_s=operation_deadline_s,
        ) as bus:
            yield bus

    async def close(self) -> None:
        for number in list(self._processes):
            await self.kill(number)
        for link in self._links.values():
            await link.close()


@asynccontextmanager
async def running_cluster(directory: Path, names: Names, **jetstream: Any) -> AsyncIterator[Cluster]:
    """Start three servers, and wait until they keep what is to be on all of them."""
    cluster = Cluster(directory, names)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        await cluster.open_links()
        for number in range(NUM_SERVERS):
            await cluster.start(number, **jetstream)
        async with cluster.connected(Role.OPERATOR) as bus:

            async def is_whole() -> bool:
                with suppress(BusError):
                    body = json.dumps({"name": PROBE, "subjects": [PROBE], "num_replicas": NUM_SERVERS}).encode()
                    made = await bus.connection.request(f"$JS.API.STREAM.CREATE.{PROBE}", body, deadline_s=0.5)
                    return b'"error"' not in made.data
                return False

            await until(is_whole)
            await bus.api.ask(f"$JS.API.STREAM.DELETE.{PROBE}")
        yield cluster
