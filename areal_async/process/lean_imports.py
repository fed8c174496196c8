"""Importing a library without another that it takes along where that is installed, and does without where it is not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    """Have a module missing while the block lasts, unless it is there already. Whoever wants it later imports it."""
    is_there = name in sys.modules
    if not is_there:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_there:
            del sys.modules[name]
