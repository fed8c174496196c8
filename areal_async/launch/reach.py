"""The broker's address, as the hosts of a run see it."""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from areal_async.errors import UserError

DEFAULT_PORT = 4222


def place_of(url: str) -> tuple[str, int]:
    """Return host and port of a broker's URL; of several servers, the first one's.

    Raises:
        UserError: it is none.
    """
    try:
        parts = urlsplit(url.split(",")[0])
        return parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as exc:
        raise UserError(f"bus.url: got {url!r}: {exc}; write it like tls://host:4222") from exc


def cure_for(*, is_ours: bool) -> str:
    """Return what makes other hosts find the broker; ``is_ours`` for the embedded one."""
    if is_ours:
        return "leave bus.host out, or set it to an address of this host that they reach"
    return "set bus.url to an address of the broker's host that they reach"


def refuse_loopback(address: str, others: Sequence[str], *, is_ours: bool) -> None:
    """Check that the broker's address does not mean each of several hosts itself: a node would never find the run.

    Args:
        others: the hosts beside the launcher's own.
        is_ours: whether the broker is the embedded one.

    Raises:
        UserError: it does, or is no address.
    """
    if others and is_loopback(address):
        raise UserError(
            f"bus: the broker's address {address} is the loopback, where {', '.join(others)} find themselves; "
            + cure_for(is_ours=is_ours)
        )


def is_loopback(address: str) -> bool:
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
