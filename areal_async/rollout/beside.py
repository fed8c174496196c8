"""Templates and tokenizers beside the loop: one long conversation must not hold up all trajectories of a node.

Tokenizers of the ``tokenizers`` library let the interpreter go meanwhile. A short conversation takes a loop less than a
thread would; a long one waits for one of a few threads.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from areal_async.rollout.text import LONG_TEXT_CHARACTERS

T = TypeVar("T")

NUM_THREADS = 2
_threads: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("areal_async_tokenizing")


def is_long(*parts: Any) -> bool:
    """Say whether texts, however deep within lists and objects, are long together."""
    left, rest = LONG_TEXT_CHARACTERS, list(parts)
    while rest and left >= 0:
        part = rest.pop()
        if isinstance(part, str):
            left -= len(part)
        elif isinstance(part, Mapping):
            rest += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            rest += part
            left -= len(part)
    return left < 0


async def run_beside(work: Callable[[], T]) -> T:
    """Run what takes long in one of the threads for it; it is waited for though the caller is cancelled."""
    limiter = _threads.get(None)
    if limiter is None:
        _threads.set(limiter := anyio.CapacityLimiter(NUM_THREADS))
    return await anyio.to_thread.run_sync(work, limiter=limiter)
