"""What a user gives to reach a broker: its address, a key, whom to trust. Checked before anything is connected."""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nkeys

from areal_async.bus.private import read_private
from areal_async.errors import UserError


def addresses_of(url: str) -> list[str]:
    """Return the addresses in ``bus.url``: of one broker, or of several servers of one cluster, with commas between.

    Raises:
        UserError: one of them is no broker's address, or some want TLS and some do not.
    """
    addresses = [one.strip() for one in url.split(",")]
    schemes = set()
    for one in addresses:
        try:
            parts = urlsplit(one)
            is_valid = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise UserError(f"bus.url: got {url!r}, need nats://host:port or tls://host:port")
        schemes.add(parts.scheme)
    if len(schemes) > 1:
        raise UserError(f"bus.url: got {url!r}, need nats:// or tls:// for all of them")
    return addresses


def authentication_of(credentials: Path | None) -> dict[str, Any]:
    """Return the client library's options for who one is; none for a broker without authentication.

    Raises:
        UserError: the file is not there, is open to others, or holds no key.
    """
    if credentials is None:
        return {}
    content = read_private(credentials, what="bus.credentials")
    if b"BEGIN NATS USER JWT" in content:
        return {"user_credentials": str(credentials)}
    try:
        nkeys.from_seed(bytearray(content.strip())).wipe()
    except (nkeys.NkeysError, ValueError) as exc:
        raise UserError(f"bus.credentials: got {credentials}, need a user's nkey seed or a .creds file") from exc
    return {"nkeys_seed": str(credentials)}


def trust_of(url: str, ca: Path | None) -> dict[str, Any]:
    """Return the client library's options for whom one trusts; none where nothing is encrypted.

    Raises:
        UserError: ``ca`` holds no certificates.
    """
    if ca is None and not url.startswith("tls://"):
        return {}
    try:
        return {"tls": ssl.create_default_context(cafile=ca)}
    except OSError as exc:  # ssl.SSLError is one
        raise UserError(f"bus.ca: got {ca}, need a file of certificates in PEM form ({exc})") from exc
