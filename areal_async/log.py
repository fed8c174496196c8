"""Logging: one JSON object per line in ``<directory>/<role>.jsonl``; warnings and above also on stderr, readable.

Every line carries ``timestamp`` (ISO 8601, UTC), ``level``, ``role``, ``event`` and the ids bound by
``structlog.contextvars``. The standard library's loggers come out the same way, so a line of a dependency
looks like one of ours.
"""

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from areal_async.errors import UserError

CHATTY = ("aiohttp", "asyncio", "httpcore", "httpx", "matplotlib", "nats", "urllib3", "uvicorn.access")
"""Loggers of dependencies that write a line per request or connection; only their warnings are kept."""


def configure(role: str, directory: Path | None) -> None:
    """Send all logging of this process to its files, replacing what was configured before.

    Args:
        role: names the file and goes into every line.
        directory: made when missing; ``None`` for stderr alone.

    Raises:
        UserError: the file cannot be written.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Role(role),
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers = [_stderr_handler(shared)]
    if directory is not None:
        handlers.append(_file_handler(directory / f"{role}.jsonl", shared))
    _replace_handlers(handlers)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def record_failure(error: BaseException) -> None:
    """Write what ends this process, with its traceback, to the file alone: stderr gets one sentence elsewhere."""
    record = logging.LogRecord(
        name="areal_async",
        level=logging.ERROR,
        pathname=__file__,
        lineno=0,
        msg="process.failed",
        args=(),
        exc_info=(type(error), error, error.__traceback__),
    )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class _Role:
    """Adds the role; unlike a context variable it also reaches threads."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("role", self._role)
        return event


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the time: a live display replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("stream: always sys.stderr; replace that instead")


def _stderr_handler(shared: list[Processor]) -> logging.Handler:
    handler = _StderrHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_formatter(shared, [_readable]))
    return handler


def _file_handler(path: Path, shared: list[Processor]) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as exc:
        raise UserError(
            f"log: got {path}, need what can be written: {exc.strerror}; choose another run.directory"
        ) from exc
    handler.setFormatter(
        _formatter(
            shared,
            [
                structlog.processors.dict_tracebacks,
                structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
            ],
        )
    )
    return handler


def _formatter(shared: list[Processor], last: list[Processor]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _readable(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Render ``12:00:01 warning node: server.fenced server_id=s0 (RuntimeError: ...)``; never more than one line."""
    fields = dict(event)
    error = _error_of(fields.pop("exc_info", None))
    head = f"{str(fields.pop('timestamp'))[11:19]} {fields.pop('level')} {fields.pop('role')}: {fields.pop('event')}"
    tail = [f"{key}={value}" for key, value in fields.items()]
    if error is not None:
        tail.append(f"({type(error).__name__}: {error})")
    return " ".join([head, *tail]).replace("\n", " | ")


def _error_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return _error_of(exc_info[1])
    return sys.exc_info()[1] if exc_info else None


def _replace_handlers(handlers: list[logging.Handler]) -> None:
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
