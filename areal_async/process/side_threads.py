"""Threads beside a loop, a few for a whole process, for what takes longer than a loop may stand still.

The work lets the interpreter go meanwhile (Pillow, ``tokenizers``). Each kind has a bound of its own: texts do not wait
behind images, and who is cancelled leaves its thread to its work, so that nobody else gets one more.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class SideThreads:
    """At most so many threads, made when they are needed."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"areal_async_{name}")

    async def run(self, work: Callable[[], T]) -> T:
        """Run work in one of them; where the caller is cancelled, what has begun ends unheard."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, work))


IMAGES = SideThreads(4, "images")
"""Each may hold one image undecoded, decoded and encoded anew."""
