"""The one place where whatever user code raises is classified."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from areal_async.errors import ArealError, PipelineError, Reject, leaves_of

MAX_MESSAGE_CHARACTERS = 1500
"""A model's output may be inside a message; a reason has to stay readable."""
MAX_READ_CHARACTERS = 10_000
"""Length of the part of a message that is read, before blanks are counted as one."""
MAX_SHOWN_CHARACTERS = 100

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN_CHARACTERS


@contextmanager
def attributed_to(error: type[ArealError], what: str) -> Iterator[None]:
    """Turn whatever user code raises into ``error``, keeping the cause.

    An error of ours raised deeper passes through (the inner boundary knew more), and so does ``Reject``.
    Of the errors that a task group has wrapped, one that ends the process goes before the others, then the first that
    is no ``Reject``. Cancellation is a BaseException and is never touched.
    """
    try:
        yield
    except (ArealError, Reject):
        raise
    except Exception as exc:
        causes = _causes_in(exc)
        cause = next((one for one in causes if isinstance(one, PipelineError)), causes[0])
        if isinstance(cause, (ArealError, Reject)):
            raise cause from exc
        raise error(describe(what, exc)) from exc


def _causes_in(exc: BaseException) -> list[BaseException]:
    """Return the errors that task groups have wrapped; those that withdraw a sibling only where all do."""
    leaves = leaves_of(exc)
    return [leaf for leaf in leaves if not isinstance(leaf, Reject)] or leaves


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what it came from.

    Their frames hold all that user code and its policy had, and mostly the error too: a circle, which would wait for
    the garbage collector with all of its tokens. (The frames cannot be emptied instead: where a caught error is shared,
    that may end a coroutine that went on.)
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        BaseException.with_traceback(one, None)  # a user's class may refuse that an attribute is set
        errors += [link for link in (one.__cause__, one.__context__) if link is not None]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions


def describe(what: str, exc: BaseException) -> str:
    """Return ``what: Type: message`` on one line, shortened; of a group, its first error's, and how many more."""
    first, *others = _causes_in(exc)
    if isinstance(first, SystemExit):
        told = f"called sys.exit({shown(first.code)})"
    else:
        told = ": ".join(filter(None, [type(first).__name__, text_of(first)]))
    more = f" (and {len(others)} more error{'s' if len(others) > 1 else ''})" if others else ""
    return f"{what}: {told}{more}"


def text_of(exc: BaseException) -> str:
    """Return what an error says on one line, shortened, as text that can be encoded; empty when it cannot say it."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001  # whatever user code has its errors do
        return ""
    is_cut = len(text) > MAX_READ_CHARACTERS
    message = encodable(" ".join(text[:MAX_READ_CHARACTERS].split()))
    if is_cut or len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS]}..."
    return message


def encodable(text: str) -> str:
    """Return text without halves of characters, which nothing that travels may hold."""
    return text.encode(errors="replace").decode()


def shown(value: object) -> str:
    """Return how a value looks, shortened before it is written: a large one takes no time, and nothing raises."""
    try:
        return encodable(_SHORT.repr(value)[:MAX_SHOWN_CHARACTERS])
    except Exception:  # noqa: BLE001  # a ``__repr__`` is user code too
        return f"<{type(value).__name__}>"
