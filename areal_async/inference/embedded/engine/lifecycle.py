"""The life of the engine's process: its port, its end and what that does not wait for. Without torch."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from areal_async.errors import UserError

T = TypeVar("T")


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
