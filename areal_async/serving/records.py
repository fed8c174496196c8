"""What was answered and what people said of it, as data: files of JSON lines, bounded in size.

``answers-*.jsonl`` has a line for each reply to each request, ``feedback-*.jsonl`` one for each feedback; ``id`` and
``choice`` join them. Invariants: no answer waits for a disk; what cannot be written is counted; no line names a key or
what a client calls its users. Lines are written within a moment of their answer and synced when their file ends.
"""

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.config.endpoint import ServeSettings
from areal_async.process.bell import Bell
from areal_async.process.file_locks import try_lock
from areal_async.protocol.fields import MAX_REWARD

ANSWERS, FEEDBACK = "answers", "feedback"
"""What the names of the files begin with."""
MAX_LINE_BYTES = 4 << 20
MAX_PENDING_BYTES = 32 << 20
"""Lines that wait for the disk."""
CLOSE_DEADLINE_S = 10.0
"""For the last lines to be written."""
MAX_COMMENT = 4096
MIN_RATING, MAX_RATING = 1, 5
MAX_CHOICE = 63

AnswerId = Annotated[str, msgspec.Meta(pattern=r"\A(chatcmpl-|resp_|msg_)[0-9a-f]{24}\Z")]

Line = TypeVar("Line", bound=msgspec.Struct)

log = structlog.get_logger()
_encoder = msgspec.json.Encoder()


class Answer(msgspec.Struct, kw_only=True):
    """One reply to one request."""

    id: str
    """The answer's, as its client has it."""
    choice: int
    """Which of the replies to the request, from 0."""
    at: str
    """When it ended, in UTC as ISO 8601."""
    api: str
    key: str
    """Name of its client's key."""
    arm: str
    version: str
    assigned: str
    """How it came to the arm: by its ``session``, the request's ``model``, or the ``share`` alone."""
    session: str
    """Hash of what its client calls the session; empty without one."""
    prompt: str
    """Hash of the conversation and the tools: the same of all answers to the same."""
    messages: list[dict[str, str]]
    """The conversation, contents as text."""
    tools: str
    """What the model was told of, as JSON; empty for nothing."""
    completion: str
    """What its client was told, without calls."""
    tool_calls: str
    """Its calls, as JSON; empty for none."""
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    """Tokens that were sampled."""
    temperature: float | None
    duration_s: float
    """From the head of the request to the end of the answer."""
    images: list[str] = []
    """SHA-256 of what was shown."""
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    """One for each of ``token_ids``; these three are empty unless ``serve.record`` is ``tokens``."""


class Feedback(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What somebody says of an answer. One of the last three is there at least."""

    id: AnswerId
    choice: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHOICE)] = 0
    reward: Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    rating: Annotated[int, msgspec.Meta(ge=MIN_RATING, le=MAX_RATING)] | None = None
    comment: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_COMMENT)] | None = None


class FeedbackLine(msgspec.Struct, kw_only=True):
    """One line of feedback."""

    id: str
    choice: int
    at: str
    key: str
    reward: float | None
    rating: int | None
    comment: str | None


class LineFiles:
    """Files of lines, of which the oldest go. Blocking: call it in one thread at a time."""

    def __init__(self, folder: Path, name: str, *, file_bytes: int, max_bytes: int) -> None:
        """Take the bound of one file, and of all of this name in the folder, of earlier processes too."""
        self._folder = folder
        self._name = name
        self._file_bytes = file_bytes
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None
        self._num_bytes = 0

    def write(self, lines: Sequence[bytes]) -> None:
        """Add lines.

        Raises:
            OSError: they cannot be written; the next ones begin another file.
        """
        try:
            for line in lines:
                if self._file is not None and self._num_bytes + len(line) > self._file_bytes:
                    self.close()
                file = self._file or self._open()
                file.write(line)
                self._num_bytes += len(line)
            if self._file is not None:
                self._file.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def close(self) -> None:
        """Sync and close the file, so that it outlives a power cut."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())

    def _open(self) -> IO[bytes]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room()
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._folder / f"{self._name}-{at}-{secrets.token_hex(3)}.jsonl"
        file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        # Others leave it alone while it grows; who was faster to lock it takes it away.
        if not try_lock(file) or not path.exists():
            file.close()
            return self._open()
        self._file, self._num_bytes = file, 0
        return file

    def _make_room(self) -> None:
        """Remove the oldest, until another whole file has room."""
        sizes = {path: path.stat().st_size for path in files_of(self._folder, self._name)}
        for path, num_bytes in list(sizes.items()):
            if sum(sizes.values()) + self._file_bytes <= self._max_bytes:
                return
            with suppress(FileNotFoundError), path.open("rb") as file:
                if try_lock(file):
                    path.unlink()
                    del sizes[path]
                    log.info("serve.records_removed", path=str(path), num_bytes=num_bytes)


class Recorder:
    """Takes lines from the loop and has a thread write them. An async context manager; the last ones are written."""

    def __init__(self, folder: Path, settings: ServeSettings) -> None:
        sizes = {"file_bytes": settings.record_file_bytes, "max_bytes": settings.record_max_bytes}
        self._files = {name: LineFiles(folder, name, **sizes) for name in (ANSWERS, FEEDBACK)}
        self._pending: dict[str, list[bytes]] = {name: [] for name in self._files}
        self._num_pending_bytes = 0
        self._changed = Bell()
        self._is_closed = False
        self.num_left_out = 0
        """Lines that were not written."""

    def note(self, name: str, line: Answer | FeedbackLine) -> None:
        """Have a line written; leave it out where it is too long, or too much waits for the disk."""
        data = _encoder.encode(line) + b"\n"
        if len(data) > MAX_LINE_BYTES or self._num_pending_bytes + len(data) > MAX_PENDING_BYTES:
            self._leave_out(1, f"a line of {len(data)} bytes, {self._num_pending_bytes} bytes before it")
            return
        self._pending[name].append(data)
        self._num_pending_bytes += len(data)
        self._changed.ring()

    async def __aenter__(self) -> Self:
        # A task of its own: it outlives a cancellation of those whose lines it writes.
        self._writing = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_closed = True
        self._changed.ring()
        with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            await asyncio.wait([self._writing])
        self._writing.cancel()

    async def _run(self) -> None:
        """Write lines as they come, until the end; all that came are written then."""
        while not self._is_closed or self._num_pending_bytes:
            if not self._num_pending_bytes:
                await self._changed.wait()
                continue
            lines, self._pending = self._pending, {name: [] for name in self._files}
            self._num_pending_bytes = 0
            for num_lines, cause in await anyio.to_thread.run_sync(self._write, lines):
                self._leave_out(num_lines, cause)
        for files in self._files.values():
            try:
                await anyio.to_thread.run_sync(files.close)
            except OSError as exc:
                log.warning("serve.records_not_synced", cause=str(exc))

    def _write(self, lines: dict[str, list[bytes]]) -> list[tuple[int, str]]:
        """Write lines; return how many were left out, and why."""
        left_out = []
        for name, own in lines.items():
            try:
                self._files[name].write(own)
            except OSError as exc:
                left_out.append((len(own), str(exc)))
        return left_out

    def _leave_out(self, num_lines: int, cause: str) -> None:
        self.num_left_out += num_lines
        log.warning("serve.records_left_out", num_lines=num_lines, cause=cause)


def lines_in(path: Path, kind: type[Line], damaged: list[Path]) -> Iterator[Line]:
    """Yield the lines of a file, longer than memory or not; note the file once for each that is damaged.

    A last line without its end is none: who writes it was killed, or is at it. Nor is a file that others have removed.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        while data := file.readline(MAX_LINE_BYTES):
            if not data.endswith(b"\n"):
                if len(data) < MAX_LINE_BYTES:
                    return
                while data and not data.endswith(b"\n"):
                    data = file.readline(MAX_LINE_BYTES)
                data = b""
            try:
                yield msgspec.json.decode(data, type=kind)
            except (msgspec.MsgspecError, RecursionError, UnicodeError):
                damaged.append(path)


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a name, oldest first."""
    return sorted(folder.glob(f"{name}-*.jsonl"))
