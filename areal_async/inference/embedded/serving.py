"""One engine from its model to its end: loaded whole, then served until it is told to stop. Imports here are heavy."""

import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
import uvloop

from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import ModelRunner, load_runner
from areal_async.inference.embedded.engine.scheduler import Scheduler
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.engine.text import Tokenizer, load_tokenizer
from areal_async.inference.embedded.engine.worker import ModelThread
from areal_async.inference.embedded.http.routes import build_app

_SWITCH_INTERVAL_S = 0.0005
"""Time for which one thread keeps the interpreter while another waits. Python's default, 5 ms, is a whole decoding
step: the model thread would stand still while the event loop writes chunks."""
_SHUTDOWN_GRACE_S = 2

log = structlog.get_logger()


def run_engine(options: EngineOptions, path: Path, bound: socket.socket, *, admin_key: str) -> int:
    """Serve the model in folder ``path`` on a bound socket; return the exit status.

    Raises:
        UserError: the model, its tokenizer or the device is unusable.
    """
    runner, tokenizer = load_runner(options, path), load_tokenizer(path)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return uvloop.run(_serve(options, runner, tokenizer, bound, admin_key))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _serve(
    options: EngineOptions, runner: ModelRunner, tokenizer: Tokenizer | None, bound: socket.socket, admin_key: str
) -> int:
    """Serve until a signal or the model thread's death; return the exit status."""
    exit_status = 0

    def on_death() -> None:
        nonlocal exit_status
        exit_status = 1
        log.error("model_thread.ended", advice="see the traceback above; restart the server")
        service.fail_all("the model thread has ended")
        server.should_exit = True

    class EmbeddedServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Streams end with an abort instead of holding the shutdown up.
            service.abort_all()
            super().handle_exit(sig, frame)

    thread = ModelThread(Scheduler(runner, options), on_death=on_death)
    service = EngineService(runner, thread, options, tokenizer)
    config = uvicorn.Config(
        build_app(service, admin_key=admin_key),
        access_log=False,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
    server = EmbeddedServer(config)
    thread.start()
    log.info("server.started", host=options.host, port=bound.getsockname()[1], model_path=options.model_path)
    try:
        await server.serve(sockets=[bound])
    finally:
        thread.stop()
    return exit_status
