"""A command line that runs inside a test silences what later tests look for."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Put back how the process logs: also in a fixture of a module, which begins before a test's own."""
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)
