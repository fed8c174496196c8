"""``python -m areal_async VERB``, and, installed, ``areal-async VERB``."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]  # -m put the working directory there: a user's random.py would be what is imported below

from contextlib import suppress

from areal_async.cli.main import main
from areal_async.process.stdio import open_missing_streams


def command() -> int:
    """Run what the command line says and return the exit status."""
    open_missing_streams()
    if "RANK" in os.environ:
        return _be_a_rank()
    return main(sys.argv[1:])


def _be_a_rank() -> int:
    """Run one of several ranks; one that fails ends at once, and so its launcher the others.

    Its threads may be in collectives, where they wait for peers that wait for them: the interpreter would join them.
    """
    status = 1
    try:
        status = main(sys.argv[1:])
    finally:
        if isinstance(error := sys.exception(), Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        if status and not isinstance(error, SystemExit):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # its terminal has gone, or its disk is full
                    stream.flush()
            os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(command())
