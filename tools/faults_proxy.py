"""A TCP proxy in front of the broker that holds, loses, cuts or delays traffic, by role and direction.

A role is known by the name in its CONNECT line. The proxy runs in a thread of its own; every method may be called from
any thread. Bytes pass in their order or not at all: where some were lost, the connection is cut at the heal.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

import anyio
import anyio.abc
import anyio.to_thread

from areal_async.process.host import LOOPBACK

LOOK_S = 0.02
CHUNK_BYTES = 1 << 16
ANY_ROLE = "*"
_NAME = re.compile(rb'"name":\s*"([^"]+)"')
_MESSAGE_ID = re.compile(rb"Nats-Msg-Id: ?([^\r\n]+)")


class Direction(Enum):
    """Direction of traffic."""

    TO_BROKER = "to the broker"
    TO_CLIENT = "to the client"


class Treatment(Enum):
    """Treatment of bytes."""

    PASS = "pass"
    HOLD = "hold"
    """Bytes are kept until the heal, as by a network that returns before TCP gives up."""
    LOSE = "lose"


class FrameRule(NamedTuple):
    """Treatment of whole messages to a role, on subjects that match."""

    role: str
    subject: re.Pattern[str]
    delay_s: float | None
    """Delay in seconds, in which later messages overtake; ``None`` loses the message."""


@dataclass(eq=False, slots=True)
class Link:
    """A client's connection and the proxy's own to the broker for it."""

    client: anyio.abc.SocketStream
    broker: anyio.abc.SocketStream
    role: str = ""
    is_torn: bool = False
    """Whether bytes were lost."""
    is_cut: bool = False
    is_half_open: bool = False
    """Whether the broker's side alone is closed."""
    _sending: anyio.Lock = field(default_factory=anyio.Lock)

    async def send_to_client(self, data: bytes) -> None:
        """Send whole messages, one sender at a time."""
        async with self._sending:
            await _send(self.client, data)


class Proxy:
    """A proxy that listens at ``proxy.port`` in its ``with`` block and passes on to the broker's port."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self.port = 0
        self.message_ids: Counter[str] = Counter()
        """Message id -> times it was sent to the broker; more than one is a repeated publish."""
        self.num_frames_hit = 0
        self._treatments: dict[tuple[str, Direction], Treatment] = {}
        self._at_publish: tuple[str, Direction, Treatment] | None = None
        self._frame_rules: tuple[FrameRule, ...] = ()
        self._links: set[Link] = set()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=lambda: anyio.run(self._serve), name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    @property
    def url(self) -> str:
        """Address that clients connect to."""
        return f"nats://{LOOPBACK}:{self.port}"

    def inject(self, roles: Iterable[str], directions: Iterable[Direction], treatment: Treatment) -> None:
        """Treat the bytes of some roles like this until ``heal``; ``ANY_ROLE`` stands for all."""
        self._treatments = {**self._treatments, **{(role, way): treatment for role in roles for way in directions}}

    def inject_at_publish(self, role: str, direction: Direction, treatment: Treatment) -> None:
        """Begin with it when the role next sends a message with an id, before the broker has that."""
        self._at_publish = role, direction, treatment

    @property
    def is_treating(self) -> bool:
        """Whether bytes of anybody are treated now."""
        return bool(self._treatments)

    def inject_messages(self, role: str, subject: str, *, delay_s: float | None) -> None:
        """Lose (``None``) or delay whole messages to a role whose subject matches the pattern, until ``heal``."""
        self._frame_rules = (*self._frame_rules, FrameRule(role, re.compile(subject), delay_s))

    def cut(self, role: str = ANY_ROLE, *, half_open: bool = False) -> None:
        """Close the connections of a role; ``half_open`` closes the broker's side alone."""
        for link in list(self._links):
            if role in (ANY_ROLE, link.role):
                if half_open:
                    link.is_half_open = True
                else:
                    link.is_cut = True

    def heal(self) -> None:
        """Let everything pass again; cut the connections that lost bytes."""
        self._treatments = {}
        self._frame_rules = ()
        for link in list(self._links):
            link.is_cut = link.is_cut or link.is_torn or link.is_half_open

    def wait_for(self, is_so: Callable[["Proxy"], bool], *, within_s: float) -> bool:
        """Wait in the calling thread for at most ``within_s`` seconds; return whether the condition came true."""
        ends_at = time.monotonic() + within_s
        while not is_so(self) and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
        return is_so(self)

    # the proxy's own thread

    async def _serve(self) -> None:
        listener = await anyio.create_tcp_listener(local_host=LOOPBACK)
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._handle)
            self._ready.set()
            await anyio.to_thread.run_sync(self._closing.wait)
            tasks.cancel_scope.cancel()

    async def _handle(self, client: anyio.abc.SocketStream) -> None:
        try:
            broker = await anyio.connect_tcp(LOOPBACK, self._broker_port)
        except OSError:
            await client.aclose()
            return
        link = Link(client, broker)
        self._links.add(link)
        try:
            async with client, broker, anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, link, tasks.cancel_scope)
                tasks.start_soon(self._run_to_client, link, tasks)
                await self._run_to_broker(link)
                tasks.cancel_scope.cancel()
        finally:
            self._links.discard(link)

    async def _watch(self, link: Link, scope: anyio.CancelScope) -> None:
        while not link.is_cut:
            if link.is_half_open:
                await link.broker.aclose()
            await anyio.sleep(LOOK_S)
        scope.cancel()

    async def _run_to_broker(self, link: Link) -> None:
        while data := await _receive(link.client):
            name = _NAME.search(data) if not link.role else None
            if name is not None:
                link.role = name[1].decode().split(".")[1]
            for match in _MESSAGE_ID.finditer(data):
                self.message_ids[match[1].decode().strip()] += 1
                self._begin_at_publish(link.role)
            if await self._may_pass(link, Direction.TO_BROKER):
                await _send(link.broker, data)

    async def _run_to_client(self, link: Link, tasks: anyio.abc.TaskGroup) -> None:
        buffer = bytearray()
        while data := await _receive(link.broker):
            if not await self._may_pass(link, Direction.TO_CLIENT):
                continue
            buffer += data
            for frame in take_frames(buffer):
                rule = self._rule_of(link, frame)
                if rule is None:
                    await link.send_to_client(frame.data)
                    continue
                self.num_frames_hit += 1
                if rule.delay_s is not None:
                    tasks.start_soon(_send_later, link, frame.data, rule.delay_s)
        if not link.is_half_open:
            tasks.cancel_scope.cancel()

    def _begin_at_publish(self, sender: str) -> None:
        if self._at_publish is not None and self._at_publish[0] == sender:
            role, direction, treatment = self._at_publish
            self._at_publish = None
            self.inject([role], [direction], treatment)

    def _rule_of(self, link: Link, frame: "Frame") -> FrameRule | None:
        if frame.subject is None:
            return None
        matching = (rule for rule in self._frame_rules if rule.role in (ANY_ROLE, link.role))
        return next((rule for rule in matching if rule.subject.search(frame.subject)), None)

    async def _may_pass(self, link: Link, way: Direction) -> bool:
        while True:
            treatment = self._treatments.get((link.role, way)) or self._treatments.get((ANY_ROLE, way), Treatment.PASS)
            if treatment is not Treatment.HOLD:
                break
            await anyio.sleep(LOOK_S)
        link.is_torn = link.is_torn or treatment is Treatment.LOSE
        return not link.is_torn and not link.is_half_open


class Frame(NamedTuple):
    """An operation of the broker's protocol, as received."""

    subject: str | None
    """Subject of a message; ``None`` for any other operation."""
    data: bytes


def take_frames(buffer: bytearray) -> list[Frame]:
    """Remove and return the complete operations at the front of the broker's bytes."""
    frames: list[Frame] = []
    while (line_end := buffer.find(b"\r\n")) >= 0:
        words = bytes(buffer[:line_end]).split()
        is_message = bool(words) and words[0].upper() in (b"MSG", b"HMSG")
        end = line_end + 2 + (int(words[-1]) + 2 if is_message else 0)
        if len(buffer) < end:
            break
        frames.append(Frame(words[1].decode() if is_message else None, bytes(buffer[:end])))
        del buffer[:end]
    return frames


async def _send_later(link: Link, data: bytes, delay_s: float) -> None:
    await anyio.sleep(delay_s)
    await link.send_to_client(data)


async def _receive(stream: anyio.abc.SocketStream) -> bytes:
    """Return the next bytes; none at the end, however the connection ended."""
    try:
        return await stream.receive(CHUNK_BYTES)
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return b""


async def _send(stream: anyio.abc.SocketStream, data: bytes) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.send(data)
