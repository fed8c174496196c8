"""Children that lead sessions of their own: signalled and ended with all that they started there."""

import os
import signal
from contextlib import suppress

import anyio
import anyio.abc


def signal_session(pid: int, number: signal.Signals) -> None:
    """Signal a child and what it started; nothing happens when all have ended."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


async def end_session(child: anyio.abc.Process, *, grace_s: float) -> None:
    """Ask a child, stopped or not, to end, and kill what there is of it and of what it started after ``grace_s``."""
    with anyio.CancelScope(shield=True):
        if child.returncode is None:
            signal_session(child.pid, signal.SIGCONT)
            signal_session(child.pid, signal.SIGTERM)
            with anyio.move_on_after(grace_s):
                await child.wait()
        signal_session(child.pid, signal.SIGKILL)  # what it started may have outlived it
        await child.aclose()
