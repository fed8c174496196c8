"""Files of a box, read, written and copied as they are, whatever a model has put there. The standard library alone.

Only regular files are read and written: a pipe would never end, a device never have said all. Trees are walked by open
folders and never by a path, so that none can become a link on the way.
"""

import errno
import os
import stat

MOST_DEEP = 200
"""Folders in folders that a snapshot goes into: each takes an open file."""
BLOCK_BYTES = 1 << 20


def read_file(path: str, target: int, most_bytes: int) -> None:
    """Copy a file's content to an open one.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than ``most_bytes``.
    """
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    _check_regular(source)
    if os.fstat(source).st_size > most_bytes:
        raise OSError(errno.EFBIG, f"got {os.fstat(source).st_size} bytes, need at most {most_bytes}")
    left = most_bytes
    while left and (block := os.read(source, min(left, BLOCK_BYTES))):
        _write_all(target, block)
        left -= len(block)


def write_file(path: str, source: int, mode: int) -> None:
    """Make a file of an open one's content, and the folders above it that are missing.

    Raises:
        OSError: it cannot be written, or there is something else that is no regular file.
    """
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, mode)
    _check_regular(target)
    os.ftruncate(target, 0)
    os.fchmod(target, mode)
    while block := os.read(source, BLOCK_BYTES):
        _write_all(target, block)


def copy_tree(source: int, target: int) -> None:
    """Copy what is in an open folder into another: modes, times, links, hard links, pipes and holes, not what is
    mounted there, nor sockets, at which nobody would listen.

    Raises:
        OSError: there is no room, or a folder lies too deep.
    """
    _Copier(os.fstat(source).st_dev).copy_folder(source, target, 0)


class _Copier:
    def __init__(self, device: int) -> None:
        self._device = device
        self._links: dict[tuple[int, int], tuple[int, str]] = {}
        """Files with several names -> the open folder of the first copy, and its name there."""
        self._kept: list[int] = []

    def copy_folder(self, source: int, target: int, depth: int) -> None:
        if depth > MOST_DEEP:
            raise OSError(errno.ELOOP, f"folders lie deeper than {MOST_DEEP}")
        with os.scandir(source) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                self._copy_below(name, status, source, target, depth)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            elif stat.S_ISREG(status.st_mode):
                self._copy_regular(name, status, source, target)
            elif stat.S_ISFIFO(status.st_mode):
                os.mkfifo(name, stat.S_IMODE(status.st_mode), dir_fd=target)
            else:
                continue
            _keep_times(name, status, target)
        status = os.fstat(source)
        os.fchmod(target, stat.S_IMODE(status.st_mode))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        if depth == 0:
            for file in self._kept:
                os.close(file)

    def _copy_below(self, name: str, status: os.stat_result, source: int, target: int, depth: int) -> None:
        os.mkdir(name, dir_fd=target)
        if status.st_dev != self._device:  # something is mounted here: the place alone
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        below, into = os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=target)
        try:
            self.copy_folder(below, into, depth + 1)
        finally:
            os.close(below)
            os.close(into)

    def _copy_regular(self, name: str, status: os.stat_result, source: int, target: int) -> None:
        identity = (status.st_dev, status.st_ino)
        if identity in self._links:
            folder, first = self._links[identity]
            os.link(first, name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
            return
        reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
        try:
            _copy_content(reading, writing, status.st_size)
            os.fchmod(writing, stat.S_IMODE(status.st_mode))
        finally:
            os.close(reading)
            os.close(writing)
        if status.st_nlink > 1:
            folder = os.dup(target)
            self._kept.append(folder)
            self._links[identity] = (folder, name)


def _copy_content(source: int, target: int, size: int) -> None:
    os.ftruncate(target, size)
    place = 0
    while place < size:
        try:
            place = os.lseek(source, place, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        end = os.lseek(source, place, os.SEEK_HOLE)
        while place < end:
            block = os.pread(source, min(BLOCK_BYTES, end - place), place)
            if not block:
                return
            place += os.pwrite(target, block, place)


def _keep_times(name: str, status: os.stat_result, target: int) -> None:
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _check_regular(file: int) -> None:
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "got what is no regular file, need one")


def _write_all(file: int, block: bytes) -> None:
    while block:
        block = block[os.write(file, block) :]
