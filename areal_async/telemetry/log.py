"""Logging: one JSON object per line in ``<directory>/<role>.jsonl``; warnings and above also on stderr, readable.

Every line carries ``timestamp`` (ISO 8601, UTC), ``level``, ``role``, ``event`` and the ids bound by
``structlog.contextvars``. The standard library's loggers come out the same way, so a line of a dependency
looks like one of ours. A file that is taken away is made again, with its folder; what cannot be written, as on a full
disk, is left out and counted. What would act on a terminal that shows a line (escapes) is seen instead.
"""

import functools
import logging
import logging.handlers
import sys
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from areal_async.errors import UserError
from areal_async.process.plain_text import escaped

CHATTY = ("aiohttp", "asyncio", "httpcore", "httpx", "nats", "urllib3", "uvicorn.access")
"""Loggers of dependencies that write a line per request or connection; only their warnings are kept."""


def quieten(level: int = logging.ERROR) -> None:
    """Log to the terminal alone, and nothing below a level: for what answers a person."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


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
        functools.partial(_with_role, role),
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers = [_stderr_handler(shared)]
    if directory is not None:
        handlers.append(_file_handler(directory / f"{role}.jsonl", shared))
    logging.basicConfig(handlers=handlers, level=logging.INFO, force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    wrap = structlog.stdlib.ProcessorFormatter.wrap_for_formatter
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, wrap],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def record_failure(error: BaseException) -> None:
    """Write what ends this process, with its traceback, to the file alone: stderr gets one sentence elsewhere."""
    record = _record(logging.ERROR, "process.failed", exc_info=(type(error), error, error.__traceback__))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _with_role(role: str, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the role; unlike a context variable it also reaches threads."""
    event.setdefault("role", role)
    return event


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current ``sys.stderr``, which a live display replaces."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("stream: always sys.stderr; replace that instead")

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a line that stderr does not take: the file has it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _FileHandler(logging.handlers.WatchedFileHandler):
    """A handler that appends to its file, opened again where it was moved, and counts lines that the disk refuses."""

    num_left_out = 0
    """Number of lines lost since the last that was written."""

    def _open(self) -> TextIOWrapper:
        """Open the file without a buffer, which would keep what a full disk refuses and fail again at each line."""
        Path(self.baseFilename).parent.mkdir(exist_ok=True)  # but no run that was taken away whole
        return TextIOWrapper(FileIO(self.baseFilename, "a"), "utf-8", errors="backslashreplace", write_through=True)

    def emit(self, record: logging.LogRecord) -> None:
        num_before, self.num_left_out = self.num_left_out, 0
        if num_before:
            with suppress(OSError):
                if self.stream is not None:
                    self.stream.write("\n")  # the last one may have been cut short
            self._emit(_record(logging.WARNING, "log.left_out", num_lines=num_before))
            if self.num_left_out:  # still
                self.num_left_out += num_before
                return
        self._emit(record)

    def _emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it: what writing raises is handled already
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the line where the disk refuses it."""
        if isinstance(sys.exc_info()[1], OSError):
            self.num_left_out += 1
        else:
            super().handleError(record)


def _record(level: int, event: str, **fields: Any) -> logging.LogRecord:
    named = {"name": "areal_async", "levelno": level, "levelname": logging.getLevelName(level)}
    return logging.makeLogRecord({**named, "msg": event, **fields})


def _stderr_handler(shared: list[Processor]) -> logging.Handler:
    handler = _StderrHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_formatter(shared, [_readable]))
    return handler


def _file_handler(path: Path, shared: list[Processor]) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path)
    except OSError as exc:
        raise UserError(
            f"log: got {path}, need what can be written: {exc.strerror}; choose another run.directory"
        ) from exc
    as_json = structlog.processors.JSONRenderer(default=str, ensure_ascii=False)
    handler.setFormatter(_formatter(shared, [structlog.processors.dict_tracebacks, as_json, _escaped]))
    return handler


def _formatter(shared: list[Processor], last: list[Processor]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _readable(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Render ``12:00:01 warning node: server.fenced server_id=s0 (RuntimeError: ...)``; never more than one line.

    A stack (``frames``) stands in the file alone: a person is told the place.
    """
    fields = dict(event)
    fields.pop("frames", None)
    error = _error_of(fields.pop("exc_info", None))
    head = f"{str(fields.pop('timestamp'))[11:19]} {fields.pop('level')} {fields.pop('role')}: {fields.pop('event')}"
    tail = [f"{key}={value}" for key, value in fields.items()]
    if error is not None:
        tail.append(f"({type(error).__name__}: {error})")
    return escaped(" ".join([head, *tail]).replace("\n", " | "))


def _escaped(logger: WrappedLogger, method: str, line: Any) -> str:
    return escaped(line)


def _error_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return _error_of(exc_info[1])
    return sys.exc_info()[1] if exc_info else None
