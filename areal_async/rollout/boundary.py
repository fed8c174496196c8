"""The one place where whatever user code raises is classified."""

from collections.abc import Iterator
from contextlib import contextmanager

from areal_async.errors import ArealError, Reject

MAX_MESSAGE_CHARACTERS = 1500
"""A model's output may be inside a message; a reason has to stay readable."""


@contextmanager
def attributed_to(error: type[ArealError], what: str) -> Iterator[None]:
    """Turn whatever user code raises into ``error``, keeping the cause.

    An error of ours raised deeper passes through (the inner boundary knew more), and so does ``Reject``.
    Cancellation is a BaseException and is never touched.
    """
    try:
        yield
    except (ArealError, Reject):
        raise
    except Exception as exc:
        cause = _only_leaf(exc)
        if isinstance(cause, (ArealError, Reject)):
            raise cause from exc
        raise error(describe(what, cause)) from exc


def _only_leaf(exc: Exception) -> Exception:
    """Look into the groups that user code's own task groups wrap around a single error."""
    while isinstance(exc, ExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc


def describe(what: str, exc: BaseException) -> str:
    """Return ``what: Type: message`` on one line, shortened."""
    message = " ".join(str(exc).split())
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS]}..."
    return f"{what}: {type(exc).__name__}: {message}" if message else f"{what}: {type(exc).__name__}"
