"""Entry point: ``python -m areal_async.inference.embedded --model-path PATH --port N``.

A wrong path, port or device ends it with status 2 and one sentence; a crash of the model thread with status 1.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from areal_async.errors import UserError
from areal_async.inference.admin_key import take_admin_key
from areal_async.inference.embedded.engine.lifecycle import bind_socket
from areal_async.inference.embedded.engine.options import EngineOptions, parse_options
from areal_async.process.gc_pauses import importing
from areal_async.process.hub import local_model
from areal_async.process.parent_death import die_with_parent
from areal_async.process.plain_text import keep_output_plain

if TYPE_CHECKING:
    import socket

    from areal_async.inference.embedded.engine.runner import ModelRunner
    from areal_async.inference.embedded.engine.text import Tokenizer

_SWITCH_INTERVAL_S = 0.0005
"""Time for which one thread keeps the interpreter while another waits. Python's default, 5 ms, is a whole decoding
step: the model thread would stand still while the event loop writes chunks."""
_SHUTDOWN_GRACE_S = 2


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
            from areal_async.inference.embedded.engine.runner import (
                load_eos_token_ids,
                load_runner,
                load_scoring_runner,
            )
            from areal_async.inference.embedded.engine.text import load_tokenizer

        runner = (load_scoring_runner if options.is_embedding else load_runner)(options, path)
        tokenizer = load_tokenizer(path)
        eos_token_ids = load_eos_token_ids(path, None if tokenizer is None else tokenizer.eos_token_id)
    except UserError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    import uvloop

    try:
        return uvloop.run(serve(options, runner, tokenizer, eos_token_ids, bound, admin_key=admin_key))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def serve(
    options: EngineOptions,
    runner: ModelRunner,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    bound: socket.socket,
    *,
    admin_key: str,
) -> int:
    """Serve on a bound socket until a signal or the model thread's death; return the exit status."""
    import structlog
    import uvicorn

    from areal_async.inference.embedded.engine.scheduler import Scheduler
    from areal_async.inference.embedded.engine.service import EngineService
    from areal_async.inference.embedded.engine.worker import ModelThread
    from areal_async.inference.embedded.http.routes import build_app

    log = structlog.get_logger()
    exit_status = 0

    def on_death() -> None:
        nonlocal exit_status
        exit_status = 1
        log.error("model_thread.ended", advice="see the traceback above; restart the server")
        service.fail_all("the model thread has ended")
        server.should_exit = True

    thread = ModelThread(Scheduler(runner, options), on_death=on_death)
    service = EngineService(runner, thread, options, tokenizer=tokenizer, eos_token_ids=eos_token_ids)
    config = uvicorn.Config(
        build_app(service, admin_key=admin_key),
        access_log=False,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )

    class EmbeddedServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Streams end with an abort instead of holding the shutdown up.
            service.abort_all()
            super().handle_exit(sig, frame)

    server = EmbeddedServer(config)
    thread.start()
    log.info("server.started", host=options.host, port=bound.getsockname()[1], model_path=options.model_path)
    try:
        await server.serve(sockets=[bound])
    finally:
        thread.stop()
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
