"""Entry point: ``python -m areal_async.inference.embedded --model-path PATH --port N``.

A wrong path, port or device ends it with status 2 and one sentence; a crash of the model thread with status 1.
"""

import os
import sys

from areal_async.errors import UserError
from areal_async.inference.admin_key import take_admin_key
from areal_async.inference.embedded.engine.lifecycle import bind_socket
from areal_async.inference.embedded.engine.options import parse_options
from areal_async.process.gc_pauses import importing
from areal_async.process.hub import local_model
from areal_async.process.parent_death import die_with_parent
from areal_async.process.plain_text import keep_output_plain


def main() -> int:
    """Run the engine; return the exit status."""
    options = parse_options()
    admin_key = take_admin_key()
    keep_output_plain()
    die_with_parent(os.getppid())  # a killed supervisor leaves no engines behind
    try:
        bound = bind_socket(options.host, options.port)
        path = local_model(options.model_path)
        # Heavy imports come after the cheap checks: a typing error is answered at once.
        with importing():
            from areal_async.inference.embedded.serving import run_engine

        return run_engine(options, path, bound, admin_key=admin_key)
    except UserError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
