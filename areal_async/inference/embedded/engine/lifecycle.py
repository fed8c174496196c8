"""The life of the engine's process: its port, its parent, its end and what that does not wait for. Without torch."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from areal_async.errors import UserError

T = TypeVar("T")

_PARENT_POLL_S = 1.0


def bind_socket(host: str, port: int) -> socket.socket:
    """Take the port now, so that a busy one is known before a model is loaded; listening comes later.

    Raises:
        UserError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as exc:
        bound.close()
        raise UserError(f"address {host}:{port}: cannot be bound: {exc}; pass another --host or --port") from exc
    return bound


def die_with_parent() -> None:
    """End this process as soon as its parent is gone, so that a killed supervisor leaves no engines behind.

    A parent that is the init process is not watched: it is nobody's supervisor, or the container ends with it.
    """
    parent = os.getppid()
    if parent > 1:
        watch = threading.Thread(target=_await_death, args=(parent, lambda: os._exit(1)), name="parent", daemon=True)
        watch.start()


def _await_death(parent: int, on_death: Callable[[], None]) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            parent_fd = os.pidfd_open(parent)
        except OSError:
            pass  # an old kernel or a sandbox; or the parent is gone, which the loop below finds at once
        else:
            select.select([parent_fd], [], [])
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    on_death()


async def call_in_thread(
    call: Callable[[], T], *, name: str = "weights", expected: tuple[type[Exception], ...] = ()
) -> T:
    """Run ``call`` in a thread of its own, which the end of the process does not wait for.

    Args:
        expected: what ``call`` raises for the caller alone; anything else is a bug and told on stderr as well.
    """
    answer: Future[T] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(call())
        except expected as exc:
            answer.set_exception(exc)
        except BaseException as exc:
            answer.set_exception(exc)
            raise

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
