"""Files that hold keys: written for their owner alone, and refused where others may read them."""

import os
import stat
from pathlib import Path

import nkeys

from areal_async.errors import UserError
from areal_async.process.atomic_folders import write_whole

FORBIDDEN = stat.S_IRWXG | stat.S_IRWXO


def write_private(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file that only its owner can read, whole: an empty key would lock a run out."""
    write_whole(path, content, mode=0o600)


def make_private_directory(path: Path) -> None:
    """Make a directory that only its owner can enter.

    Raises:
        UserError: it exists, and is open to others.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path, what="directory of keys", need=0o700)


def read_private(path: Path, *, what: str) -> bytes:
    """Return the content of a file with a key.

    Raises:
        UserError: it cannot be read, or others may read it as well.
    """
    check_private(path, what=what, need=0o600)
    try:
        return path.read_bytes()
    except OSError as exc:
        raise UserError(f"{what}: cannot read {path}: {exc}") from exc


def check_private(path: Path, *, what: str, need: int) -> None:
    """Raise UserError unless ``path`` is open to its owner alone."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as exc:
        raise UserError(f"{what}: cannot read {path}: {exc}") from exc
    if mode & FORBIDDEN:
        raise UserError(f"{what}: got {path} with mode {mode:o}, which others may use, need {need:o}; chmod it")


def ensure_key(path: Path) -> str:
    """Return the public key of the seed in ``path``, making the seed first where there is none.

    Raises:
        UserError: others may read it.
    """
    if not path.exists():
        write_private(path, nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    pair = nkeys.from_seed(bytearray(read_private(path, what="key of the embedded broker").strip()))
    public: str = pair.public_key.decode()
    pair.wipe()
    return public
