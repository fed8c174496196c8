"""Who may ask: a file of keys with names, for its owner alone.

A line is ``NAME KEY``, or ``NAME sha256:HEX`` of a key that nobody can read there any more, as the keys that are made
here are kept. Invariants: how long a key is looked for says nothing about any key; none gets into a log or a record.
"""

import hmac
import re
import secrets
from hashlib import sha256
from pathlib import Path

import structlog

from areal_async.bus.private import read_private, write_private
from areal_async.errors import UserError
from areal_async.process.file_locks import try_lock

NUM_KEY_BYTES = 32
MIN_KEY_CHARACTERS = 16
MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
FIRST = "default"
"""Name of the key that is made where there is none."""
HASHED = "sha256:"
_is_name = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_is_hash = re.compile(r"[0-9a-f]{64}").fullmatch

log = structlog.get_logger()


class Keyring:
    """The keys of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        """Read them.

        Raises:
            UserError: the file is not there, is open to others, or has something else than keys.
        """
        self._path = path
        self._stamp = _stamp(path)
        self._hashes = _read(path)

    @property
    def num_keys(self) -> int:
        """Keys that there are."""
        return len(self._hashes)

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None for what is none."""
        shown, found = sha256(key.encode(errors="surrogatepass")).digest(), None
        for name, hashed in self._hashes.items():
            if hmac.compare_digest(shown, hashed):
                found = name
        return found

    def refresh(self) -> None:
        """Take in what the file says now; of one that cannot be read, what it said before stays."""
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._hashes = _read(self._path)
            log.info("serve.keys_read", names=sorted(self._hashes))
        except UserError as exc:
            log.warning("serve.keys_unreadable", cause=str(exc))


def add_key(path: Path, name: str) -> str:
    """Make a key, add it to the file, made when missing, and return it: nobody can read it there.

    Raises:
        UserError: the name is taken or none, the file is open to others, or another process adds one now.
    """
    if not _is_name(name):
        raise UserError(f"key: got the name {name[:70]!r}, need 1 to 64 of letters, digits, . _ and -")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        if not try_lock(lock):
            raise UserError(f"key: another process adds one to {path} at this moment; try again")
        lines = b""
        if path.exists():
            if name in _read(path):
                raise UserError(f"key: {path} has one called {name} already, need another name; or take that line out")
            lines = read_private(path, what="serve.keys").rstrip(b"\n") + b"\n"
        key = f"sk-{secrets.token_urlsafe(NUM_KEY_BYTES)}"
        write_private(path, lines + f"{name} {HASHED}{sha256(key.encode()).hexdigest()}\n".encode())
    return key


def _read(path: Path) -> dict[str, bytes]:
    """Return SHA-256 of each key, by name."""
    content = read_private(path, what="serve.keys")
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"serve.keys: got {path} of {len(content)} bytes, need {MAX_FILE_BYTES} at most")
    hashes: dict[str, bytes] = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"serve.keys: {path}, line {number}"
        if len(words) != 2 or not _is_name(words[0]):
            raise UserError(f"{where}: need NAME KEY, the name of letters, digits, . _ and -")
        name, key = words
        if name in hashes:
            raise UserError(f"{where}: got a second key called {name}, need a name for each")
        if key.startswith(HASHED) and not _is_hash(key.removeprefix(HASHED)):
            raise UserError(f"{where}: got {HASHED} without 64 hexadecimal digits after it")
        if len(key) < MIN_KEY_CHARACTERS:
            raise UserError(f"{where}: got a key of {len(key)} characters, need {MIN_KEY_CHARACTERS} at least")
        is_hashed = key.startswith(HASHED)
        hashes[name] = bytes.fromhex(key.removeprefix(HASHED)) if is_hashed else sha256(key.encode()).digest()
    if not hashes or len(hashes) > MAX_KEYS:
        raise UserError(f"serve.keys: got {len(hashes)} keys in {path}, need 1 to {MAX_KEYS}")
    return hashes


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
