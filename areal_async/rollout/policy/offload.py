"""Templates and tokenizers beside the loop: one long conversation must not hold up all trajectories of a node.

Tokenizers of the ``tokenizers`` library let the interpreter go meanwhile. A short conversation takes a loop less than a
thread would; a long one waits for one of a few threads.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from areal_async.process.side_threads import SideThreads
from areal_async.rollout.policy.text import LONG_TEXT_CHARACTERS

T = TypeVar("T")

NUM_THREADS = 2
_threads = SideThreads(NUM_THREADS, "tokenizing")


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
    """Run what takes long in one of the threads for it; where the caller is cancelled, what has begun ends unheard."""
    return await _threads.run(work)


async def beside_if_long(work: Callable[[], T], *parts: Any) -> T:
    """Run what takes long for long ``parts`` beside the loop where they are that, else at once."""
    return await run_beside(work) if is_long(*parts) else work()
