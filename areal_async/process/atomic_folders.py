"""Folders and files that are there whole or not at all, through a crash or a power cut, and while somebody reads them.

Written under another name beside the final one, every file synced, renamed, the parent synced. Who reads a folder that
may be deleted holds a shared lock of one file in it, who deletes it the exclusive one: the kernel gives back what a
killed reader held, and file systems that hosts share keep such locks of files, not all of them of folders.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from areal_async.process.file_locks import try_lock
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import Version

LEDGER = "ledger"
"""In a checkpoint: what it was trained on. Readers hold the folder by it."""


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """Give a fresh folder to fill; when the block ends without an error it becomes ``directory``, else it is deleted.

    One that is there already is replaced.
    """
    partial = partial_name(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        finish(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def link_folder(source: Path, directory: Path) -> None:
    """Have a folder of files that never change under a second name, whole, at no cost of room where that can be."""

    def link(file: str, target: str) -> None:
        try:
            os.link(file, target)
        except OSError:  # some file systems have no second names
            shutil.copyfile(file, target)

    with written_whole(directory) as partial:
        shutil.copytree(source, partial, copy_function=link, dirs_exist_ok=True)


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file under another name, then publish it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    publish_file(temporary, path)


def publish_file(temporary: Path, path: Path) -> None:
    """Have a finished file replace the one at ``path``: a reader never sees half, nor does one after a power cut."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def partial_name(directory: Path) -> Path:
    """Return where ``directory`` is filled: beside it, so that a rename stays on one file system."""
    return directory.with_name(f".{directory.name}.partial")


def finish(partial: Path, directory: Path) -> None:
    """Sync everything in ``partial`` and rename it to ``directory``."""
    for folder, _, files in os.walk(partial):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    replaced = directory.with_name(f".{directory.name}.replaced")
    if directory.exists():
        with suppress(OSError):
            _remove(replaced)
        directory.rename(replaced)
    partial.rename(directory)
    sync(directory.parent)
    with suppress(OSError):
        _remove(replaced)


def keep_newest(
    directory: Path,
    count: int,
    *,
    also: Collection[str] = (),
    is_wanted: Callable[[str], bool] = lambda name: False,
    lease: str = "",
    lineage: int | None = None,
) -> None:
    """Delete all but the newest ``<lineage>-<step>`` folders of a directory, and those named in ``also``.

    Args:
        is_wanted: whether one stays all the same, asked once nobody holds it any more: who did may want it now.
        lease: name of the file in each by which its readers hold it (``held``); what is held stays this time.
        lineage: whose folders they are: what a newer one, which has replaced it, is just writing is left alone.
    """
    for leftover in (*directory.glob(".*.partial"), *directory.glob(".*.replaced")):
        name = leftover.stem.removeprefix(".")
        if lineage is None or not is_version(name) or Version.parse(name).lineage <= lineage:
            _remove(leftover)  # of a save that a crash cut short
    for version in versions_in(directory)[:-count]:
        if str(version) not in also:
            delete(directory / str(version), lease, is_wanted)


@contextmanager
def held(folder: Path, lease: str) -> Iterator[bool]:
    """Keep ``keep_newest`` from deleting a folder while the block lasts; say whether it is there."""
    try:
        file = (folder / lease).open("rb")
    except FileNotFoundError:
        yield False
        return
    with file:
        yield try_lock(file, is_shared=True) and (folder / lease).is_file()  # else it is being deleted


def is_held(folder: Path, lease: str) -> bool:
    """Whether somebody holds a folder now."""
    try:
        with (folder / lease).open("r+b") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def delete(folder: Path, lease: str, is_wanted: Callable[[str], bool]) -> bool:
    """Delete a folder unless somebody holds or wants it; who comes later finds none. Say whether it is gone.

    Args:
        lease: as in ``keep_newest``, and ``is_wanted`` too.
    """
    aside = folder.with_name(f".{folder.name}.replaced")
    with ExitStack() as stack:
        if lease and (folder / lease).is_file():
            file = stack.enter_context((folder / lease).open("r+b"))  # some file systems give writers alone this lock
            if not try_lock(file):
                return False
        if is_wanted(folder.name):
            return False
        folder.rename(aside)
    _remove(aside)
    return True


def _remove(folder: Path) -> None:
    """Delete a folder; of one that was put elsewhere, the link to it, and a file that has a folder's name."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()


def sync(path: Path) -> None:
    """Have a file, or a folder's list of files, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def versions_in(folder: Path) -> list[Version]:
    """Return the versions that folders in a folder are named by, oldest first."""
    return sorted(Version.parse(path.name) for path in folder.glob("*-*") if is_version(path.name))
