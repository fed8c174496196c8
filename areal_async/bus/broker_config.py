"""The embedded broker's configuration file and keys, written into the run directory, readable by its owner alone.

Promise P1 rests on one line of it: ``sync_interval: always`` makes an acknowledged message one that
survives a power cut.
"""

import json
import re
import shutil
from pathlib import Path

from areal_async.bus.accounts import accounts, key_path
from areal_async.bus.permissions import Role
from areal_async.bus.private import write_private
from areal_async.config.settings import MAX_PAYLOAD_BYTES, Settings
from areal_async.errors import UserError
from areal_async.process.host import LOOPBACK

CONFIG_FILE, PID_FILE = "nats.conf", "nats.pid"
MAX_PENDING_BYTES = 128 << 20
"""A client that leaves more than this unread is cut off. More than twice what is fetched at once: what the broker
writes counts until the last of it is written, also what of that was read already, and has made room for another one."""
UNNAMED_ACCOUNT = "$G"
"""The broker's own name for the account of a configuration that names none."""
DISK_MARGIN_BYTES = 256 << 20
"""Left free on the disk: a full one would freeze the streams without an error."""

UNTOLD = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
"""Characters that stand in no configuration file of the broker."""


def credentials_path(run_directory: Path, role: Role) -> Path:
    """Return where the key of ``role`` lies."""
    return key_path(keys_directory(run_directory), role)


def keys_directory(run_directory: Path) -> Path:
    """Return where the keys of all roles lie."""
    return run_directory / "credentials"


def credentials_for(settings: Settings, run_directory: Path, role: Role) -> Path | None:
    """Return what ``role`` shows the run's broker: its key at the embedded one, else what ``bus.credentials`` holds."""
    if settings.bus.url == "embedded":
        return credentials_path(run_directory, role)
    given = settings.bus.credentials
    return key_path(given, role) if given is not None and given.is_dir() else given


def write_config(
    settings: Settings, *, path: Path, port: int, http_port: int, log_file: Path | None = None, host: str = LOOPBACK
) -> None:
    """Write the configuration; JSON is a form that the broker reads. Its monitoring page is for this host alone.

    Args:
        log_file: opened anew at SIGUSR1; ``None`` for stderr.

    Raises:
        UserError: the broker cannot be told this path, or has no room there.
    """
    if UNTOLD.search(str(path)):
        raise UserError(
            f"run.directory: got {ascii(str(path.parent.parent))}, need a path that is UTF-8 and has no control "
            "characters; name another folder"
        )
    store = path.parent / "jetstream"
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    _adopt(store / "jetstream", settings.names.account(Role.OPERATOR))
    config = {
        "server_name": f"areal-{settings.run.name}",
        "listen": f"{host}:{port}",
        "http": f"{LOOPBACK}:{http_port}",
        "pid_file": str(path.with_name(PID_FILE)),
        **({"log_file": str(log_file)} if log_file is not None else {}),
        "max_payload": MAX_PAYLOAD_BYTES,
        "max_pending": MAX_PENDING_BYTES,
        "write_deadline": "10s",
        "jetstream": {
            "store_dir": str(store),
            "sync_interval": "always",
            "max_file_store": _disk_bytes(store, settings.bus.max_disk_bytes),
            "max_memory_store": 64 << 20,
        },
        "accounts": accounts(settings.names, keys_directory(settings.run_directory)),
    }
    write_private(path, json.dumps(config, indent=1, ensure_ascii=False).encode())  # it knows no \u


def _adopt(stores: Path, account: str) -> None:
    """Give the operator's account the store of a run that was begun when all roles were in the broker's one account."""
    old, own = stores / UNNAMED_ACCOUNT, stores / account
    if old.is_dir() and not own.exists():
        old.rename(own)


def _disk_bytes(store: Path, max_disk_bytes: int) -> int:
    """Return the broker's share of the disk: as set, or what is free and already its own, whichever is less."""
    own = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    free = shutil.disk_usage(store).free + own - DISK_MARGIN_BYTES
    if free <= 0:
        raise UserError(f"disk of {store}: less than {DISK_MARGIN_BYTES >> 20} MB is free; make room for the broker")
    return min(max_disk_bytes, free)
