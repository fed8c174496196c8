"""One connection to the broker; ``client`` below it is what the client library becomes here.

It adds what the library leaves open. A request ends as soon as the connection is lost, so that it can
be retried at once; a denied subject fails its request quickly instead of by timeout; connecting says
what is wrong in one sentence; and a connection that the broker ended for good fails everything loudly.
"""

import asyncio
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import anyio
import anyio.lowlevel
import msgspec
import nats.aio.client
import nats.aio.msg
import nats.aio.subscription
import nats.errors
import structlog

from areal_async.bus.access import addresses_of, authentication_of, trust_of
from areal_async.bus.client import Client, NoTlsError
from areal_async.bus.permissions import Role
from areal_async.errors import BusError, DeniedError, UnreachableError, UserError

MIN_SERVER_VERSION = (2, 12, 7)
"""Older ones have known holes in their permissions, and silently ignore options that promises rest on."""
MIN_API_LEVEL = 2
"""Batched direct gets came with 1, atomic batches with 2."""
CONNECT_TRY_S = 2.0
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 2.0
MOST_PING_S = 3 * PING_INTERVAL_S
"""Longest time between two pings, however seldom a process speaks: of a connection that is dead without a word it knows
after ``MAX_OUTSTANDING_PINGS`` and one more, and has to be back before it is taken for gone (``failure_detector``)."""
MAX_OUTSTANDING_PINGS = 2
MOST_TIMES = 8.0
"""How many times as seldom as by itself a process speaks at the most: one that is more so would be taken for silent."""
PENDING_BYTES = 32 << 20
"""Written and not yet on the socket; more makes a writer wait."""
MAX_QUEUED_MESSAGES = 1 << 20
MAX_QUEUED_BYTES = 1 << 30
"""Bounds of the library's own queues, which drop what is beyond them: ours are bounded by what is asked for."""

NO_RESPONDERS = "503"
"""The status with which the broker answers a request that nobody listens for."""
UNAVAILABLE = 503
"""The code in an answer of JetStream that passes by itself."""

_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)

log = structlog.get_logger()


class ConnectionLostError(BusError):
    """No answer came, and none will: it may or may not have been carried out. Retry."""


class NoAnswerError(ConnectionLostError):
    """Nothing answered in time over a connection that is there: the server may be cut off from its cluster."""


class Received(NamedTuple):
    """A message as it came off the wire."""

    subject: str
    reply: str
    headers: dict[str, str]
    data: bytes

    @property
    def status(self) -> str | None:
        """The broker's own remark (``404``, ``408``, ...) when this is no message of a stream.

        A delivery has a reply subject and what is read has a sequence; the header of that name is then the sender's.
        """
        return None if self.reply or "Nats-Sequence" in self.headers else self.headers.get("Status")


Handler = Callable[[Received], None]


class Connection:
    """A named, authenticated connection that reconnects until it is closed. Made by ``connect``."""

    def __init__(self, url: str, *, name: str, role: Role) -> None:
        """Prepare it.

        Args:
            url: of the broker; of a cluster, several servers with commas between, and the first is tried first.
        """
        self.url = url
        self.name = name
        self.role = role
        self.on_reconnect: list[Callable[[], None]] = []
        """Called in order each time the connection is back. They must not block."""
        self.times = 1.0
        """How many times as seldom as by itself this process speaks where nothing happens. Set by ``slow_down``."""
        self.num_losses = 0
        """Number of losses of the connection: unchanged means that everything sent in between has arrived in order."""
        self.client = Client()
        """The library's own, for what it builds on top of itself (``service``)."""
        self._connected = anyio.Event()
        self._is_closing = False
        self.last_error: Exception | None = None
        """The newest trouble that the library reported."""
        self._denied: set[tuple[str, str]] = set()
        self._calls: dict[str, PendingRequest] = {}
        self._num_calls = 0
        self._inbox = ""

    @property
    def is_connected(self) -> bool:
        """Whether the broker can be reached now, as far as is known."""
        return bool(self.client.is_connected) and self._connected.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether it ended for good."""
        return bool(self.client.is_closed)

    async def wait_connected(self) -> None:
        """Wait, without a deadline, until the broker can be reached.

        Raises:
            BusError: the connection ended for good.
        """
        while not self.is_connected:
            self.check_open()
            if self._connected.is_set():  # lost, and the callback that tells has not run yet
                await anyio.sleep(0.01)
            else:
                await self._connected.wait()

    async def request(
        self, subject: str, payload: bytes = b"", *, deadline_s: float, headers: Mapping[str, str] | None = None
    ) -> Received:
        """Send one request and return its one answer.

        Raises:
            NoAnswerError: nothing answered within ``deadline_s``.
            ConnectionLostError: the connection broke meanwhile.
            BusError: the subject is denied to this role, or the message is too large for the broker.
        """
        with self.call(subject) as call, anyio.move_on_after(deadline_s):
            await call.send(payload, headers)
            return await call.receive()
        raise NoAnswerError(f"request to {subject}: no answer from {self.url} within {deadline_s:g} s")

    def call(self, subject: str) -> "PendingRequest":
        """Return a request that may have many answers, as a context manager."""
        self._num_calls += 1
        return PendingRequest(self, subject, f"{self._inbox}.{self._num_calls}")

    async def publish(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message nobody confirms.

        Raises:
            ConnectionLostError: not connected now.
            BusError: the subject is known to be denied, or the message is too large.
        """
        self.check_open()
        self.check_allowed("publish", subject)
        size = len(payload) + sum(len(key) + len(value) + 4 for key, value in (headers or {}).items()) + 16
        if size > self.client.max_payload:  # the broker would end the connection
            raise BusError(
                f"message to {subject}: got {size} bytes with headers, need at most {self.client.max_payload}; "
                "send less or raise max_payload at the broker"
            )
        if not self.is_connected:
            raise ConnectionLostError(f"message to {subject}: not connected to {self.url}")
        try:
            await self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
        except nats.errors.Error as exc:
            raise ConnectionLostError(f"message to {subject}: {exc}") from exc

    @asynccontextmanager
    async def listening(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        """Call ``handler`` for every message on ``subject`` while the block runs, through reconnects; then no more."""
        subscription = await self.listen(subject, handler)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                if not self.is_closed:
                    await subscription.unsubscribe()

    async def listen(self, subject: str, handler: Handler) -> nats.aio.subscription.Subscription:
        """Call ``handler`` for every message on ``subject``, reconnects included, for the life of the connection."""

        async def handle(message: nats.aio.msg.Msg) -> None:
            handler(Received(message.subject, message.reply, message.headers or {}, message.data))

        self.check_open()
        return await self.client.subscribe(
            subject, cb=handle, pending_msgs_limit=MAX_QUEUED_MESSAGES, pending_bytes_limit=MAX_QUEUED_BYTES
        )

    def new_inbox(self) -> str:
        """Return a subject under which only this role can listen."""
        return str(self.client.new_inbox())

    def check_allowed(self, action: str, subject: str) -> None:
        """Raise DeniedError when the broker has denied to ``publish`` to, or a ``subscription`` to, the subject."""
        if (action, subject.lower()) in self._denied:
            raise DeniedError(f"{action} to {subject}: denied to the role {self.role}")

    def slow_down(self, times: float) -> None:
        """Ping, look at keys that are also heard of, and renew pulls so many times as seldom as by itself."""
        self.times = times
        self.client.options["ping_interval"] = min(MOST_PING_S, PING_INTERVAL_S * times)  # read anew for each ping

    async def go_elsewhere(self) -> None:
        """Leave this server of a cluster for another one; of a broker that is alone nothing is left."""
        if self.is_connected and self.client.has_other_server:
            log.warning("bus.server_left", connection=self.name, server=self.server_info.get("server_name"))
            await self.client.force_reconnect()

    async def aclose(self, deadline_s: float = 2.0) -> None:
        """Wait until what was sent has arrived, then close. Every request that still waits fails."""
        with anyio.CancelScope(shield=True):
            if self.is_connected and not self._is_closing:
                with suppress(BusError):
                    await self.request("$JS.API.INFO", deadline_s=deadline_s)  # answered after all that came before
            self._is_closing = True
            with anyio.move_on_after(deadline_s):
                await self.client.close()
            for _ in range(3):  # the tasks that the library cancels end within the next turns of the loop
                await anyio.lowlevel.checkpoint()
        self._fail_calls(ConnectionLostError, "the connection was closed")

    async def open(self, authentication: Mapping[str, Any]) -> None:
        """Connect and authenticate; for ``connect``, which also checks who answers."""
        await self.client.connect(
            addresses_of(self.url),
            dont_randomize=True,  # in turn: another server than the one that was lost comes first
            name=self.name,
            inbox_prefix=self.role.inbox_prefix,
            allow_reconnect=False,  # until the first handshake has succeeded: what fails there is to be told
            max_reconnect_attempts=-1,
            connect_timeout=CONNECT_TRY_S,  # type: ignore[arg-type]
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            ping_interval=PING_INTERVAL_S,  # type: ignore[arg-type]
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            pending_size=PENDING_BYTES,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            **authentication,
        )
        self.client.options["allow_reconnect"] = True
        self._connected.set()
        self._inbox = self.new_inbox()
        await self.listen(self._answers, self._on_answer)

    @property
    def _answers(self) -> str:
        """Where all answers to requests arrive."""
        return f"{self._inbox}.*"

    @property
    def server_info(self) -> dict[str, Any]:
        """What the broker said about itself when it greeted."""
        return dict(self.client._server_info)

    @property
    def is_clustered(self) -> bool:
        """Whether the broker is a cluster: what it stores may have copies, of which only the leader's is up to date."""
        return bool(self.client._server_info.get("cluster"))

    def check_open(self) -> None:
        """Raise BusError when the connection ended for good."""
        if self._is_closing:
            raise BusError(f"connection {self.name}: closed")
        if self.is_closed:
            raise BusError(f"connection {self.name}: ended by the broker at {self.url}: {self.last_error}")

    def _on_answer(self, received: Received) -> None:
        call = self._calls.get(received.subject)
        if call is not None:
            call.answers.put_nowait(received)

    def _fail_calls(self, kind: type[BusError], reason: str) -> None:
        for call in self._calls.values():
            call.answers.put_nowait(kind(f"request to {call.subject}: {reason}"))

    async def _on_error(self, error: Exception) -> None:
        self.last_error = error
        denied = _DENIED.search(str(error))
        if denied is None:
            log.debug("bus.error_reported", connection=self.name, error=str(error) or repr(error))
            return
        action, subject = denied[1].lower(), denied[2].lower()  # the library lowers the broker's words
        self._denied.add((action, subject))
        if (action, subject) == ("subscription", self._answers.lower()):  # no answer will come: who asks is told
            self._fail_calls(DeniedError, f"subscription to {self._answers}: denied to the role {self.role}")
            return
        log.error("bus.permission_denied", connection=self.name, role=self.role.value, action=action, subject=subject)
        for call in self._calls.values():
            if action == "publish" and call.subject.lower() == subject:
                call.answers.put_nowait(DeniedError(f"publish to {call.subject}: denied to the role {self.role}"))

    async def _on_disconnected(self) -> None:
        self.num_losses += 1
        if self._connected.is_set():
            self._connected = anyio.Event()
        if not self._is_closing:
            log.warning("bus.disconnected", connection=self.name, url=self.url)
        self._fail_calls(ConnectionLostError, f"the connection to {self.url} was lost")

    async def _on_reconnected(self) -> None:
        log.info("bus.reconnected", connection=self.name, url=self.url)
        self._denied.clear()
        self._connected.set()
        for hook in list(self.on_reconnect):
            hook()

    async def _on_closed(self) -> None:
        if not self._is_closing:
            log.error("bus.connection_ended", connection=self.name, error=str(self.last_error))
        self._connected.set()  # those who wait find out that it is closed
        self._fail_calls(ConnectionLostError, "the connection was closed")


class PendingRequest:
    """A request in flight: its answers in order, or the failure that ended it."""

    def __init__(self, connection: Connection, subject: str, reply: str) -> None:
        self.subject = subject
        self._connection = connection
        self._reply = reply
        self.answers: asyncio.Queue[Received | BusError] = asyncio.Queue()
        """Answers in order, and last the failure after which none comes."""

    def __enter__(self) -> Self:
        self._connection._calls[self._reply] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._connection._calls[self._reply]

    async def send(self, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Publish the request.

        Raises:
            BusError: as ``publish``; or this role may not hear the answers.
        """
        self._connection.check_allowed("subscription", self._connection._answers)
        await self._connection.publish(self.subject, payload, reply=self._reply, headers=headers)

    async def receive(self) -> Received:
        """Return the next answer. Waits without a deadline.

        Raises:
            ConnectionLostError: the connection broke.
            BusError: the subject is denied.
        """
        answer = await self.answers.get()
        if isinstance(answer, BusError):
            raise answer
        return answer


async def connect(
    url: str, *, name: str, role: Role, credentials: Path | None, deadline_s: float, ca: Path | None = None
) -> Connection:
    """Connect to a broker that is new enough to keep our promises.

    Args:
        url: ``nats://host:port`` or ``tls://host:port``; of a cluster also several, with commas between.
        name: Shown by the broker's own tools.
        credentials: A file with an nkey's seed, or a ``.creds`` file; ``None`` for a broker without authentication.
        ca: Certificates (PEM) of the authority that signed the broker's; ``None`` for those the system trusts.

    Raises:
        UserError: no address, not trusted, refused, too old, or without JetStream.
        UnreachableError: no answer within ``deadline_s``.
    """
    addresses = addresses_of(url)
    authentication = authentication_of(credentials) | trust_of(url, ca)
    last_error: Exception | None = None
    random.shuffle(addresses)  # else all of a run's processes would be one server's
    with anyio.move_on_after(deadline_s):
        while True:
            async with AsyncExitStack() as stack:
                connection = Connection(",".join(addresses), name=name, role=role)
                stack.push_async_callback(connection.aclose)
                try:
                    await connection.open(authentication)
                    _check_greeting(connection)
                    await _check_jetstream(connection)
                except (OSError, TimeoutError, nats.errors.Error, ConnectionLostError, DeniedError) as exc:
                    _check_curable(exc, url, role, credentials)
                    last_error = exc
                else:
                    stack.pop_all()
                    return connection
                finally:
                    last_error = last_error or connection.last_error
            addresses.append(addresses.pop(0))
            await anyio.sleep(RECONNECT_WAIT_S)
    reason = "no answer" if last_error is None else str(last_error) or repr(last_error)
    raise UnreachableError(f"broker {url}: not reachable within {deadline_s:g} s ({reason}); start it or set bus.url")


def _check_curable(error: Exception, url: str, role: Role, credentials: Path | None) -> None:
    """Raise UserError where trying again would not help."""
    if isinstance(error, ssl.SSLCertVerificationError):
        raise UserError(
            f"broker {url}: its certificate is not trusted ({error.verify_message}); "
            "set bus.ca to its authority's certificate, or mend bus.url"
        ) from error
    if isinstance(error, NoTlsError):
        raise UserError(f"broker {url}: it offers no TLS; configure it there, or use nats://") from error
    if isinstance(error, DeniedError):
        raise UserError(
            f"broker {url}: {credentials} is not the key of the role {role} ({error}); give that as bus.credentials"
        ) from error
    if "authorization" in str(error).lower():
        raise UserError(
            f"broker {url}: refused the role {role} with credentials {credentials}; check bus.credentials"
        ) from error


def _check_greeting(connection: Connection) -> None:
    info = connection.server_info
    got = str(info.get("version", "none"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", got)[:3])
    if numbers < MIN_SERVER_VERSION:
        need = ".".join(map(str, MIN_SERVER_VERSION))
        raise UserError(
            f"broker {connection.url}: got nats-server {got}, need {need} or newer; "
            "older ones silently ignore options that durability and permissions rest on"
        )


async def _check_jetstream(connection: Connection) -> None:
    answer = await connection.request("$JS.API.INFO", deadline_s=CONNECT_TRY_S)
    if answer.status == NO_RESPONDERS:
        raise UserError(f"broker {connection.url}: JetStream is not enabled there; enable it for this account")
    told = msgspec.json.decode(answer.data)
    if told.get("error", {}).get("code") == UNAVAILABLE:  # a cluster that is electing its leader
        raise ConnectionLostError(str(told["error"].get("description")))
    level = told.get("api", {}).get("level", 0)
    if level < MIN_API_LEVEL:
        raise UserError(f"broker {connection.url}: got JetStream API level {level}, need {MIN_API_LEVEL} or newer")
