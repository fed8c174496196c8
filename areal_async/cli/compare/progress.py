"""How far a comparison is, for whoever waits: on stderr, as stdout has the result alone."""

import sys
import time

from areal_async.process.plain_text import escaped

TELL_S = 10.0
"""Time between two lines."""


def tell_progress(text: str) -> None:
    """Say a line."""
    sys.stderr.write(f"{escaped(text)}\n")
    sys.stderr.flush()


class Progress:
    """How many answers of one side have come."""

    def __init__(self, name: str, num_wanted: int) -> None:
        self._name = name
        self._num_wanted = num_wanted
        self._num_answered = 0
        self._told_s = time.monotonic()

    def note(self) -> None:
        """Count one more, and say so now and then."""
        self._num_answered += 1
        if time.monotonic() > self._told_s + TELL_S:
            self._told_s = time.monotonic()
            tell_progress(f"{self._name}: {self._num_answered} of {self._num_wanted} answered")
