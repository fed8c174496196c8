"""Children, most of which lead sessions of their own: started, signalled and ended with all that they started there."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc


async def open_child(command: Sequence[str], **options: Any) -> anyio.abc.Process:
    """Start a child as ``anyio.open_process`` does, also while its starter is given up: nobody else could end it.

    Raises:
        OSError: its program cannot be run.
    """
    with anyio.CancelScope(shield=True):
        child = await anyio.open_process(command, **options)
    return child  # noqa: RET504 -- a scope may swallow what is raised in it, for all that mypy knows


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
