"""Logs that stay within bounds, however long a run is: one that has grown too large is set aside and begins anew.

Who writes one has it open, and servers are no programs of ours. So it is copied and then emptied, as logrotate's
``copytruncate`` does; lines that come between the two are lost. Everybody opens logs for appending: what is written
next stands at the beginning.
"""

import os
import shutil
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

MAX_LOG_BYTES = 64 << 20
INTERVAL_S = 30.0
LOGS = ("*.jsonl", "*.log", "*.out")
OLDER = ".1"
"""What the name of the part that was set aside ends with; there is one of each log."""

log = structlog.get_logger()


async def run_rotation(logs: Path) -> None:
    """Keep each log below ``MAX_LOG_BYTES``, and its older part, until cancelled.

    consumes:     the logs of all processes of this run, or of this node
    waits for:    the next look
    produces:     older parts, in place of those before
    unblocked by: cancellation alone
    """
    while True:
        for path in await anyio.to_thread.run_sync(rotate, logs, MAX_LOG_BYTES):
            log.info("log.rotated", path=str(path))
        await anyio.sleep(INTERVAL_S)


def rotate(logs: Path, max_bytes: int) -> list[Path]:
    """Set aside what is larger; return which. What cannot be, for want of room say, is tried again at the next look."""
    rotated = []
    for path in sorted(path for pattern in LOGS for path in logs.glob(pattern)):
        try:
            if path.stat().st_size > max_bytes:
                _set_aside(path)
                rotated.append(path)
        except OSError as exc:
            log.warning("log.not_rotated", path=str(path), error=str(exc))
    return rotated


def _set_aside(path: Path) -> None:
    older, copy = path.with_name(path.name + OLDER), path.with_name(path.name + ".tmp")
    try:
        with path.open("r+b") as log_file, copy.open("wb") as copied:
            shutil.copyfileobj(log_file, copied, 1 << 20)
            copied.flush()
            copy.rename(older)
            os.ftruncate(log_file.fileno(), 0)
    finally:
        copy.unlink(missing_ok=True)
