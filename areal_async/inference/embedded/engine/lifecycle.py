"""The life of the engine's process: its port, its end and what that does not wait for. Without torch."""

import asyncio
import socket
from collections.abc import Callable
from typing import TypeVar

from areal_async.errors import UserError
from areal_async.process.daemon_thread import in_daemon_thread

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
    return await asyncio.wrap_future(in_daemon_thread(call, name=name, expected=expected))
