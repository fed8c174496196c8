"""Folders that are there whole or not at all, through a crash or a power cut.

Written under another name beside the final one, every file synced, renamed, the parent synced.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.types import Version

_VERSION = re.compile(r"\d+-\d+")


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


def keep_newest(directory: Path, count: int, *, also: Collection[str] = ()) -> None:
    """Delete all but the newest ``<lineage>-<step>`` folders of a directory, and those named in ``also``."""
    for leftover in (*directory.glob(".*.partial"), *directory.glob(".*.replaced")):
        shutil.rmtree(leftover)  # of a save that a crash cut short
    folders = [path for path in directory.iterdir() if path.is_dir() and _VERSION.fullmatch(path.name)]
    for path in sorted(folders, key=lambda path: Version.parse(path.name))[:-count]:
        if path.name not in also:
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
