"""Freed memory, given back: what glibc's allocator would keep of it.

Each mapping that is freed teaches glibc to take the next blocks of that size, up to 32 MiB, from its heap, where those
that were freed stay between those that live on: of a model of 101 million parameters four ranks that had 1.1 GB each
took 2.0 to 2.2 GB. A block that is a mapping of its own goes when it is freed, and has its pages made anew each time:
with layers of a million parameters and fewer that takes longer than to compute on them. So where a step is short its
blocks stay in the heap, which grows whenever no gap is left for a large one, and is given back from time to time.
"""

import ctypes
import os

ARENAS = "MALLOC_ARENA_MAX"
"""How many heaps glibc has. With one for each thread, what one frees lies idle while the next takes more."""
M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 1 << 20


def one_heap() -> dict[str, str]:
    """Return what has a process take one heap for all its threads, unless the environment says how many."""
    return {ARENAS: os.environ.get(ARENAS, "1")}


def give_back_freed() -> None:
    """Give the pages of what has been freed back now, where the C library is glibc; its heap is locked meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_blocks() -> None:
    """Have blocks of a mebibyte and more be mappings of their own from now on, where the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)
