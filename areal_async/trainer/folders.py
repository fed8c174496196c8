"""Folders that are there whole or not at all, through a crash or a power cut.

Written under another name beside the final one, every file synced, renamed, the parent synced.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """Give a fresh folder to fill; when the block ends without an error it becomes ``directory``.

    One that is there already is replaced.
    """
    partial = partial_name(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    finish(partial, directory)


def partial_name(directory: Path) -> Path:
    """Return where ``directory`` is filled: beside it, so that a rename stays on one file system."""
    return directory.with_name(f".{directory.name}.partial")


def finish(partial: Path, directory: Path) -> None:
    """Sync everything in ``partial`` and rename it to ``directory``."""
    for folder, _, files in os.walk(partial):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    replaced = directory.with_name(f".{directory.name}.replaced")
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
