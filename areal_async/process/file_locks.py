"""Locks of open files, which the kernel gives back when their holder ends, however it ends."""

import fcntl
import os
from typing import IO


def try_lock(file: IO[str] | IO[bytes], *, is_shared: bool = False) -> bool:
    """Lock a file for as long as it is open, for readers or for this process alone; say whether nobody else has it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(lock: IO[str]) -> None:
    """Leave this process's number in a lock file, for people."""
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
