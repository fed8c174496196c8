"""Files and folders that users name for what a verb writes: whole or not at all, and refused in one sentence."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areal_async.errors import UserError


def check_place(option: str, path: Path) -> None:
    """Refuse a name at which nothing can be written, before the work that is to go there. Makes the folders above.

    Raises:
        UserError: it cannot be made.
    """
    with _told(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # As long as any name that it has until it is whole.
        tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent).cleanup()


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """Give another name to write under, then rename: a reader never sees half a file. Makes the folders above.

    Raises:
        UserError: it cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{option}: got {path}, a directory, need a file; name one in it")
    temporary = path.with_name(path.name + ".tmp")
    with _told(option, path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def _told(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        cause = exc.strerror or exc
        raise UserError(f"{option}: got {path}, need what can be written: {cause}; name another place") from exc
