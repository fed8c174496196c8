"""Prepare a broker of one's own: write the accounts of a run, as JSON, and make the keys of its roles.

    python -m areal_async.bus RUN FOLDER > accounts.json

The broker's configuration includes the file; the run takes the folder as ``bus.credentials``.
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

from areal_async.bus.accounts import accounts
from areal_async.errors import UserError
from areal_async.protocol.subjects import Names


def main() -> None:
    """Say what is wrong in one sentence, with status 1."""
    parser = ArgumentParser(prog="python -m areal_async.bus", description="the accounts of a run at a broker, as JSON")
    parser.add_argument("run", help="run.name")
    parser.add_argument("folder", type=Path, help="of the roles' keys, made where there are none: bus.credentials")
    words = parser.parse_args()
    try:
        made = accounts(Names(words.run), words.folder)
    except (UserError, ValueError, OSError) as exc:
        sys.exit(f"accounts: {exc}")
    sys.stdout.write(json.dumps({"accounts": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
