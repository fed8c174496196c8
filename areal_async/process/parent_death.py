"""Make a process die with the one that started it.

    python -I -S parent_death.py PARENT_PID SIGNAL COMMAND...

becomes COMMAND, sent the signal by the kernel as soon as its parent is gone, however that ended. Done here rather
than between fork and exec, where Python code is not safe in a process that has threads. Run as a file: it starts in
some milliseconds, with the standard library alone.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Does nothing where there is no ``prctl``."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
        if os.getppid() != parent_pid:  # it ended before the call above took effect
            sys.exit("the process that started this one is gone")


def guarded(command: Sequence[str], *, by: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command that runs ``command`` for as long as this process lives, and then sends it a signal."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(by.value), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), by=signal.Signals(int(sys.argv[2])))
    os.execvp(sys.argv[3], sys.argv[3:])
