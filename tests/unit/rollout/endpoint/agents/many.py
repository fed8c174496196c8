"""Run one of these programs for whoever asks: a line with an address and a key in, a line with what it wrote out."""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module


def main() -> None:
    program = import_module(sys.argv[1])
    for line in sys.stdin:
        os.environ.update(json.loads(line))
        told = io.StringIO()
        with redirect_stdout(told):
            program.main()
        print(json.dumps(dict(json.loads(one) for one in told.getvalue().splitlines())), flush=True)


main()
