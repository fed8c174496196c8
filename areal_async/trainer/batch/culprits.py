"""Which groups of a batch make its step fail, found by training parts of it. Pure, but for the question it is given."""

from collections.abc import Awaitable, Callable, Sequence

from areal_async.errors import leaves_of
from areal_async.protocol.wire import MAX_REASON_CHARACTERS

Try = Callable[[Sequence[str]], Awaitable[str]]
"""Trains some groups alone; returns why that fails, nothing where it does not."""


class NoRoomError(Exception):
    """There was too little memory to train these groups where they were tried, which says nothing of them."""


async def find_culprits(groups: Sequence[str], why: str, attempt: Try) -> dict[str, str]:
    """Return the groups that fail by themselves, each with why, of a batch that has failed for this reason.

    None where it is nobody's fault: where nothing at all fails too, or every one of several groups does, or none. Nor
    where ``attempt`` raises NoRoomError: the longest groups would be blamed.
    Of n groups k are found with about ``2 k log2(n)`` questions.
    """
    try:
        if not groups or await attempt([]):
            return {}
        found = await _halve(groups, why, attempt)
    except NoRoomError:
        return {}
    return found if len(found) < len(groups) or len(groups) == 1 else {}


def said_by(error: Exception) -> str:
    """Return why, in a line; never nothing."""
    first = leaves_of(error)[0]
    return f"{type(first).__name__}: {first}"[:MAX_REASON_CHARACTERS]


async def _halve(groups: Sequence[str], why: str, attempt: Try) -> dict[str, str]:
    """Look into groups that fail together, for this reason."""
    if len(groups) == 1:
        return {groups[0]: why}
    found: dict[str, str] = {}
    middle = len(groups) // 2
    for half in (groups[:middle], groups[middle:]):
        if reason := await attempt(half):
            found |= await _halve(half, reason, attempt)
    return found
