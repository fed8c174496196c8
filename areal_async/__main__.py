"""``python -m areal_async VERB``."""

import sys

from areal_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
