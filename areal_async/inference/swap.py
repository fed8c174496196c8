"""Give one server another weights version while it generates.

    staged (hashes checked) -> pause -> update -> continue -> the server names the new version

Invariant: whatever happens between pause and continue, continue is sent; a server is never left paused by
us. Only the swap pauses anything: the files are read and checked before it begins.
"""

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import structlog

from areal_async.inference.faults import ServerFault, StagingFault
from areal_async.inference.http import ServerApi
from areal_async.types import WeightsVersion

ORDER_DEADLINE_S = 60.0
"""For pausing and continuing, which wait for one step of the server at most."""

log = structlog.get_logger()


class SwapTimes(NamedTuple):
    """Where the time of one swap went, in seconds."""

    pause_s: float
    transfer_s: float
    resume_s: float


class Staging:
    """Checks each announced version's files once, however many servers are about to load them."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._checked = ""

    async def check(self, target: WeightsVersion) -> float:
        """Check the files against their hashes in a thread; return the seconds it took.

        Raises:
            StagingFault: a file is missing or differs.
        """
        started = time.monotonic()
        async with self._lock:
            if self._checked != target.version:
                await anyio.to_thread.run_sync(_check_files, target)
                self._checked = target.version
        return time.monotonic() - started


def _check_files(target: WeightsVersion) -> None:
    for name, expected in target.sha256.items():
        path = Path(target.path, name)
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise StagingFault(f"weights {target.version}: {exc}") from exc
        if found != expected:
            raise StagingFault(f"weights {target.version}: {path} has hash {found}, need {expected}")


async def swap(api: ServerApi, target: WeightsVersion, *, mode: str, deadline_s: float) -> SwapTimes:
    """Load ``target``, whose files are checked, into one server.

    Raises:
        ServerFault: it did not pause, load, continue, or does not name the new version afterwards.
    """
    start = time.monotonic()
    paused = updated = start
    try:
        await api.pause(mode, deadline_s=ORDER_DEADLINE_S)
        paused = time.monotonic()
        await api.load_weights(
            path=_absolute(target.path),
            version=target.version,
            flush_cache=mode != "in_place",  # requests held in place keep their cache, which cannot be flushed
            deadline_s=deadline_s,
        )
        updated = time.monotonic()
    finally:
        with anyio.CancelScope(shield=True):
            await api.resume(deadline_s=ORDER_DEADLINE_S)
    resumed = time.monotonic()
    version = await api.weight_version(deadline_s=ORDER_DEADLINE_S)
    if version != target.version:
        raise ServerFault(f"after the update: got version {version!r}, need {target.version}")
    return SwapTimes(pause_s=paused - start, transfer_s=updated - paused, resume_s=resumed - updated)


def _absolute(path: str) -> str:
    """The server may have another working directory."""
    return os.path.abspath(path)
