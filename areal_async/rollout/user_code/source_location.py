"""Which lines of a stack are the user's own: their files are told about, the library's and Python's are not."""

import linecache
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from areal_async.errors import leaves_of

PACKAGE = Path(__file__).resolve().parents[2]


class SourceLocation(NamedTuple):
    """A line of the user's."""

    file: str
    """Relative to the root, where it lies below it."""
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class UserCode:
    """The files below ``root``, and below the workflow's own folder wherever that lies, that are no library's."""

    def __init__(self, workflow_file: Path, *, root: Path | None = None) -> None:
        """Take ``None`` for the working directory."""
        self._workflow_file = workflow_file.resolve()
        self._root = (root or Path.cwd()).resolve()

    def owns(self, file: str) -> bool:
        """Say whether a code object's file is the user's."""
        path = Path(file).resolve()
        if path == self._workflow_file:
            return True
        return (
            (path.is_relative_to(self._root) or path.is_relative_to(self._workflow_file.parent))
            and not path.is_relative_to(PACKAGE)
            and "site-packages" not in path.parts
            and path.suffix == ".py"
        )

    def locations(self, error: BaseException) -> list[SourceLocation]:
        """Return where an error came through the user's code, outermost first; of a group, its first error's.

        Of a cancellation that is where the code waited.
        """
        leaf = leaves_of(error)[0]
        parts = [error] if leaf is error else [error, leaf]
        frames = [pair for part in parts for pair in traceback.walk_tb(part.__traceback__)]
        return [self._location(frame, line) for frame, line in frames if self.owns(frame.f_code.co_filename)]

    def innermost(self, frame: FrameType | None) -> SourceLocation | None:
        """Return the user's line that a running stack stands at."""
        for inner, line in traceback.walk_stack(frame):
            if self.owns(inner.f_code.co_filename):
                return self._location(inner, line)
        return None

    def _location(self, frame: FrameType, line: int) -> SourceLocation:
        path = Path(frame.f_code.co_filename).resolve()
        file = path.relative_to(self._root) if path.is_relative_to(self._root) else path
        return SourceLocation(str(file), line, frame.f_code.co_name, linecache.getline(str(path), line).strip())
