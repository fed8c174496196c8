"""Threads for images, a few for a whole process: to decode one takes longer than a loop may stand still.

Pillow lets the interpreter go meanwhile. A bound of its own: texts do not wait behind images.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

NUM_THREADS = 4
"""Each may hold one image undecoded, decoded and encoded anew."""
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="areal_async_images")


async def run_beside(work: Callable[[], T]) -> T:
    """Run work on images in one of the threads; where the caller is cancelled, what has begun ends unheard."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(context.run, work))
