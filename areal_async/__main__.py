"""``python -m areal_async VERB``."""

import sys

from areal_async.cli.main import main
from areal_async.speech import open_missing_streams

if __name__ == "__main__":
    open_missing_streams()
    sys.exit(main(sys.argv[1:]))
