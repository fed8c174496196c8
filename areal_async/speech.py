"""What a process says on stdout: line by line, for as long as somebody reads it."""

import os
import sys


def say(line: str) -> None:
    """Write one line, now: a pipe sees it as soon as a terminal would. Who reads no more, as ``head``, misses the rest.

    A run goes on without its reader: what it says stands in its logs too.
    """
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        fall_silent()


def fall_silent() -> None:
    """Have what is still written to stdout go nowhere; else Python complains of it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
