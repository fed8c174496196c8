"""The client library's client, with holes closed through which another client of the broker could end a connection.

Every publisher chooses the bytes of a subject and of the headers, and the broker checks neither: it takes any byte in
a subject but blanks, tabs and line ends, and passes on headers that are none. Where the library stumbles over one, a
message that is stored ends the connection of its reader at every delivery.
"""

import asyncio
import re

import nats.aio.client
import nats.aio.msg
import nats.errors
import nats.protocol.parser
import structlog

FORWARDED = "Areal-Forwarded"
"""The header that is added here to a message that was the answer to a read before it was stored."""
_READ_MARK = b"Nats-Sequence: "
"""The broker adds this header to what it reads for somebody; no message of ours is stored with it."""
ASKER = "Nats-Request-Info"
"""The broker's word on the account from which a message has come into the operator's."""
_ASKER_MARK = b"Nats-Request-Info: "

_WORD, _GAP = rb"([^ \t\r\n]+)", rb"[ \t]+"
_REPLY = rb"(" + _WORD + _GAP + rb")?"
# Fields end where the broker ends them: the library's patterns also part them at a form feed.
nats.protocol.parser.MSG_RE = re.compile(rb"\AMSG" + _GAP + _WORD + _GAP + _WORD + _GAP + _REPLY + rb"(\d+)\r\n")
nats.protocol.parser.HMSG_RE = re.compile(
    rb"\AHMSG" + _GAP + _WORD + _GAP + _WORD + _GAP + _REPLY + rb"(\d+)[ \t]+(\d+)\r\n"
)

log = structlog.get_logger()


class NoTlsError(nats.errors.Error):
    """The broker does not ask for the TLS that its address promises."""


class Client(nats.aio.client.Client):
    """One connection. ``tls://`` means TLS, no subject and no headers end it, and it can be closed."""

    def _connect_command(self) -> bytes:
        # At every connect, reconnects included: a server without TLS is not shown the credentials.
        server, transport = self._current_server, self._transport
        assert server is not None
        assert transport is not None
        if server.uri.scheme == "tls" and not self._server_info.get("tls_required"):
            transport.close()  # type: ignore[no-untyped-call]  # nobody else would: the next try makes a new one
            raise NoTlsError("no TLS")
        return bytes(super()._connect_command())

    # The library's own leaves the connection of a try that came to nothing open.
    async def _connect_to_server(self, s: nats.aio.client.Srv) -> None:
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    @property
    def has_other_server(self) -> bool:
        """Whether it knows another server than the one that it is connected to."""
        return len(self._server_pool) > 1

    async def force_reconnect(self) -> None:
        """Connect to another server if there is one."""
        self._server_pool.sort(key=lambda one: one is self._current_server)  # it is tried last
        await super().force_reconnect()

    async def parse_headers(self, raw: bytes) -> dict[str, str]:
        """Return the headers of a message that was not delivered, but stands in an answer; also what is added here."""
        parsed = await self._process_headers(raw) or {}
        return {**parsed, FORWARDED: "1"} if _READ_MARK in raw else parsed

    # The library's own would end the read loop, and with it the connection, over a subject that is no UTF-8.
    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> nats.aio.msg.Msg:
        subject, reply = _as_text(subject), _as_text(reply)
        built: nats.aio.msg.Msg = super()._build_message(sid, subject, reply, data, headers)
        return built

    # The library's own would end the read loop over headers that are none.
    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (IndexError, ValueError) as exc:
            log.warning("headers.unreadable", reason=str(exc), head=headers[:100])
            parsed = None
        if headers and headers.count(_READ_MARK) > 1:
            parsed = {**(parsed or {}), FORWARDED: "1"}
        if headers and _ASKER_MARK in headers:
            # The broker's own is the last: to headers that do not end as they should it stands amid another's value.
            told = headers.rpartition(_ASKER_MARK)[2].partition(b"\r\n")[0]
            parsed = {**(parsed or {}), ASKER: told.decode(errors="replace")}
        return parsed

    # The library's own writes what is left; where nobody is to read it, that raises before anything is let go. It waits
    # for the transport's end on one future for all, which its reconnecting takes along when it is cancelled there.
    async def _close(self, status: int, do_cbs: bool = True) -> None:
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task else 0
        try:
            await super()._close(status, do_cbs)
        except (OSError, RuntimeError, nats.errors.Error) as exc:  # RuntimeError: uvloop's, of a closed transport
            log.debug("bus.closed_unwritten", num_bytes=self._pending_data_size, reason=str(exc))
            self._pending, self._pending_data_size = [], 0
        except asyncio.CancelledError:
            if task and task.cancelling() > num_cancels:
                raise
            self._transport = None
        else:
            return
        self._status = Client.DISCONNECTED
        await self._close(status, do_cbs)


def _as_text(name: bytes) -> bytes:
    return name.decode(errors="backslashreplace").encode()
