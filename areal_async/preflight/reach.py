"""Whether the hosts that a run would have find its broker."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import anyio.to_thread

from areal_async.errors import UserError
from areal_async.host import check_address
from areal_async.launch.backend import Backend
from areal_async.launch.run import EMBEDDED
from areal_async.preflight.findings import Finding, error, good, of_mistake
from areal_async.settings import Settings

DEFAULT_PORT = 4222
CHECK = "hosts"


async def check_hosts(settings: Settings, backend: Backend) -> Finding:
    """Connect from each other host to where the broker is, or will be: there the embedded one is stood in for."""
    try:
        return await _look(settings, backend)
    except UserError as mistake:
        return of_mistake(CHECK, mistake)


async def _look(settings: Settings, backend: Backend) -> Finding:
    bus, others = settings.bus, backend.hosts[1:]
    is_ours = bus.url == EMBEDDED
    if is_ours:
        if bus.host is not None:
            check_address(bus.host, setting="bus.host")
        address, wanted_port = bus.host or await backend.address(), bus.port
    else:
        address, wanted_port = _place(bus.url)
    is_loopback = await anyio.to_thread.run_sync(_is_loopback, address)
    if not others:
        return good(CHECK, f"this one alone{_for_guests(address, is_loopback=is_loopback)}")
    names = ", ".join(others)
    cure = "leave bus.host out, or set it to an address of this host that they reach"
    if not is_ours:
        cure = "set bus.url to an address of the broker's host that they reach"
    if is_loopback:
        return error(CHECK, f"the broker's address {address} is the loopback, where {names} find themselves", cure)
    with _listening(address, wanted_port, is_ours=is_ours) as port:
        lost = await backend.cannot_reach(address, port)
    if lost:
        told = "; ".join(f"{host}: {why}" for host, why in lost.items())
        return error(CHECK, f"the broker's address {address}:{port} cannot be reached from {told}", cure)
    return good(CHECK, f"{len(others)} beside this one ({names}), which reach the broker's address {address}")


def _place(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as exc:
        raise UserError(f"bus.url: got {url!r}: {exc}; write it like tls://host:4222") from exc


def _for_guests(address: str, *, is_loopback: bool) -> str:
    if is_loopback:
        return f"; nodes of others cannot join, as the broker's address is {address}: set bus.host where some are to"
    return f"; nodes of others join at the broker's address {address}"


def _is_loopback(address: str) -> bool:
    """Whether a name or an address means this very host wherever it is looked up. Many a host calls itself 127.0.1.1.

    Raises:
        UserError: it has no address.
    """
    try:
        found = socket.getaddrinfo(address, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise UserError(
            f"bus: got the address {address!r}, which is none ({exc}); correct bus.url or bus.host"
        ) from exc
    return all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found)


@contextmanager
def _listening(address: str, port: int, *, is_ours: bool) -> Iterator[int]:
    """Have somebody listen where the embedded broker will; another one does so itself."""
    if not is_ours:
        yield port
        return
    try:
        with socket.create_server((address, port)) as listener:
            yield listener.getsockname()[1]
    except OSError as exc:
        raise UserError(f"bus.port: got {port} of {address}: {exc}; choose another, or 0 for a free one") from exc
