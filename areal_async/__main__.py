"""``python -m areal_async VERB``, and, installed, ``areal-async VERB``."""

import sys

from areal_async.cli.main import main
from areal_async.process.stdio import open_missing_streams


def command() -> int:
    """Run what the command line says and return the exit status."""
    open_missing_streams()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(command())
