"""A call in a thread of its own, which the end of the process does not wait for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], *, name: str, expected: tuple[type[Exception], ...] = ()) -> Future[T]:
    """Start ``call`` in a thread; return its answer to come.

    Args:
        expected: what ``call`` raises for the caller alone; anything else is a bug and told on stderr as well.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from here on a cancelled caller leaves it alone

    def run() -> None:
        try:
            answer.set_result(call())
        except expected as exc:
            answer.set_exception(exc)
        except BaseException as exc:
            answer.set_exception(exc)
            raise

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
