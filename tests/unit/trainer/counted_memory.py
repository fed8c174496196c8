"""What torch's allocator is asked for on the CPU while something is done."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


class Counted(NamedTuple):
    """Bytes above what was there before."""

    peak: int
    left: int


def count(work: Callable[[], T]) -> tuple[T, Counted]:
    """Return what ``work`` returns, and what it has taken."""
    gc.collect()  # what is left of the work before must not be given back while this one is counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events: Any = seen.profiler
    held = most = 0
    for event in sorted(events.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return result, Counted(most, held)
