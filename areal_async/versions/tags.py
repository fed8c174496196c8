"""Tags: names that people, or a run's gate, give to versions. ``tags.jsonl`` in the run's directory.

Invariant: lines are only added, each synced before it counts, by one writer at a time; the newest line of a tag holds,
and one without a version takes the tag away. A last line that a power cut left without its end says nothing, and the
next writer takes it off.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated

import msgspec

from areal_async.errors import UserError
from areal_async.process.atomic_folders import sync
from areal_async.process.file_locks import try_lock
from areal_async.protocol.events import now
from areal_async.protocol.fields import BEST as BEST
from areal_async.protocol.fields import LAST as LAST
from areal_async.protocol.fields import OptionalVersionText, TagText, is_tag
from areal_async.protocol.types import Record, Version

MAX_TAGS = 1000
"""Different names in one run."""
MAX_TEXT = 200
MAX_LINE_BYTES = 8 << 10
LOCK_DEADLINE_S = 10.0
"""For another writer to be done, who has one line to write."""
LOCK_POLL_S = 0.01

ShortText = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Tag(Record, frozen=True, kw_only=True):
    """One line: a name that a version has from then on."""

    tag: TagText
    version: OptionalVersionText
    """Empty where the tag is taken away."""
    by: ShortText = ""
    why: ShortText = ""
    at: ShortText = msgspec.field(default_factory=now)
    """Time, in UTC as ISO 8601."""
    comparison: ShortText = ""
    """Id of the comparison behind it; empty where there is none."""
    was: OptionalVersionText = ""
    """Version that had the tag until then; empty where none had."""
    is_forced: bool = False
    """Whatever a comparison says."""


def read(run_directory: Path) -> dict[str, Tag]:
    """Return the tags of a run that hold now, by name.

    Raises:
        UserError: the file was damaged.
    """
    newest = {line.tag: line for line in history(run_directory)}
    return {name: newest[name] for name in sorted(newest) if newest[name].version}


def shown(run_directory: Path) -> dict[str, str]:
    """Return which version each tag has, for people; none where they cannot be read, of which others tell."""
    with suppress(UserError):
        return {name: tag.version for name, tag in read(run_directory).items()}
    return {}


def history(run_directory: Path) -> Iterator[Tag]:
    """Yield every line of a run's tags, oldest first.

    Raises:
        UserError: the file was damaged.
    """
    with suppress(FileNotFoundError), _file(run_directory).open("rb") as file:
        yield from _lines(file)


def tagged(run_directory: Path) -> set[Version]:
    """Return the versions that have a tag.

    Raises:
        UserError: the file was damaged.
    """
    return {Version.parse(tag.version) for tag in read(run_directory).values()}


def write(run_directory: Path, tag: Tag, *, over: str | None = None) -> Tag | None:
    """Add a line; return it as it stands there, with what had the tag until then.

    Args:
        over: the version that must have the tag until now, empty for none; where another one has it, nothing is
            written, and None returned.

    Raises:
        UserError: the name can be no tag; the file cannot be written, was damaged, or is held for too long.
    """
    check_name(tag.tag)
    with _locked(run_directory) as file:
        newest = {line.tag: line for line in _lines(file)}
        was = newest[tag.tag].version if tag.tag in newest else ""
        if over is not None and was != over:
            return None
        if tag.tag not in newest and len(newest) >= MAX_TAGS:
            raise UserError(f"tag {tag.tag}: the run has {MAX_TAGS} already, need one of those")
        written = msgspec.structs.replace(tag, was=was)
        _append(file, written)
        sync(run_directory)
    return written


def check_name(name: str) -> None:
    """Refuse what can be no tag.

    Raises:
        UserError: it is reserved, or could be a version.
    """
    if name in (LAST, BEST):
        raise UserError(f"tag: got {name}, which is always the {'newest' if name == LAST else 'best'} version")
    if not is_tag(name):
        raise UserError(f"tag: got {name[:70]!r}, need a lower-case letter, then up to 63 letters, digits, - or _")


def _file(run_directory: Path) -> Path:
    return run_directory / "tags.jsonl"


@contextmanager
def _locked(run_directory: Path) -> Iterator[IO[bytes]]:
    """Open the file for one writer."""
    path, ends_at = _file(run_directory), time.monotonic() + LOCK_DEADLINE_S
    try:
        path.touch()
        with path.open("r+b") as file:
            while not try_lock(file):
                if time.monotonic() > ends_at:
                    raise UserError(f"{path}: another process has held it for {LOCK_DEADLINE_S:g} s; end that one")
                time.sleep(LOCK_POLL_S)
            yield file
    except OSError as exc:
        raise UserError(f"{path}: cannot be written: {exc.strerror}") from exc


def _append(file: IO[bytes], tag: Tag) -> None:
    """Add a line where the last whole one ends, and have it outlive a power cut."""
    file.seek(0)
    end = file.read().rfind(b"\n") + 1
    file.truncate(end)
    file.seek(end)
    file.write(msgspec.json.encode(tag) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _lines(file: IO[bytes]) -> Iterator[Tag]:
    file.seek(0)
    for number in range(1, 1 << 62):
        line = file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            if len(line) < MAX_LINE_BYTES:
                return
            raise UserError(f"{file.name}: line {number} is too long for a tag; correct the file")
        try:
            yield msgspec.json.decode(line, type=Tag)
        except msgspec.MsgspecError as exc:
            raise UserError(f"{file.name}: line {number} is no tag: {exc}; correct the file") from exc
