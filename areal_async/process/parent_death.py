"""Make a process die with the one that started it.

    python -m areal_async.process.parent_death PARENT_PID COMMAND...

becomes COMMAND, killed by the kernel as soon as its parent is gone, however that ended. Done here rather
than between fork and exec, where Python code is not safe in a process that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Does nothing where there is no ``prctl``."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
        if os.getppid() != parent_pid:  # it ended before the call above took effect
            sys.exit(1)


def guarded(command: list[str]) -> list[str]:
    """Return the command that runs ``command`` for as long as this process lives."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
