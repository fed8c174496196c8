"""Where a process stands, written on request: SIGUSR1 adds the stacks of all its threads and tasks to a file.

    kill -USR1 <pid>; less runs/<name>/logs/stacks-node-0.txt

A thread of its own waits for the signal and writes where all threads stand, so also while the event loop is held up, or
the main thread waits inside a library; tasks follow as soon as the main thread runs Python code again. All of it is
done with the interpreter held: a signal handler that reads the frames of a thread while it runs, as faulthandler's
does, has ended a node, and ends a busy process at one question in some thousands.

Invariant: ``ask`` never ends who is asked, as the signal would do to a process that has not come to ``install`` yet.
"""

import _thread
import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from areal_async.process.interpreter import module_command

MAX_FILE_BYTES = 1 << 20
"""Beyond it the file begins anew with the next process."""
MAX_STACKS = 200
"""Different stacks of tasks that are written; how many tasks stand at the same place is a number."""
MAX_FRAMES = 30


def path_for(run_directory: Path, name: str) -> Path:
    """Return the file of one process of a run."""
    return run_directory / "logs" / f"stacks-{name}.txt"


def hold() -> None:
    """Have no thread that is started from now on take SIGUSR1. Call before libraries start threads of their own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def install(path: Path) -> None:
    """Answer SIGUSR1 in this process from now on. Call from the main thread."""
    hold()
    path.parent.mkdir(parents=True, exist_ok=True)
    is_full = path.exists() and path.stat().st_size > MAX_FILE_BYTES
    path.open("wb" if is_full else "ab").close()
    signal.signal(signal.SIGUSR1, lambda *_: _write_tasks(path))
    threading.Thread(target=_answer, args=(path,), name="stacks", daemon=True).start()


def _answer(path: Path) -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        with suppress(OSError), _opened(path) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        _thread.interrupt_main(signal.SIGUSR1)


def _opened(path: Path) -> IO[bytes]:
    """Open the file, made again where it was taken away. Without a buffer: two may write at once."""
    path.parent.mkdir(exist_ok=True)
    return path.open("ab", buffering=0)


def ask(pid: int) -> bool:
    """Have a process on this host write where it stands; False when it has not come so far, or is gone.

    Before it has, the signal would end it. Where the kernel does not tell, nobody is asked.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if not int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
            return False
        os.kill(pid, signal.SIGUSR1)
    except (OSError, StopIteration):
        return False
    return True


def ask_command(pid: int) -> list[str]:
    """Return the command line that asks a process of the host on which it runs."""
    return module_command(__name__, str(pid))


def task_stacks(tasks: set["asyncio.Task[Any]"]) -> str:
    """Return where these tasks stand, those at the same place together, innermost frame last."""
    places = Counter(tuple(_frames(task)) for task in tasks)
    parts = [
        f"{number} tasks at:\n" + "".join(f"  {frame}\n" for frame in place)
        for place, number in places.most_common(MAX_STACKS)
    ]
    if len(places) > MAX_STACKS:
        parts.append(f"and {len(places) - MAX_STACKS} more places\n")
    return "\n".join(parts)


def _write_tasks(path: Path) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        tasks = set()
    # a full disk: raised from here it would end whatever the main thread does
    with suppress(OSError), _opened(path) as file:
        file.write(f"\nprocess {os.getpid()}, {len(tasks)} tasks\n\n{task_stacks(tasks)}\n".encode())


def _frames(task: "asyncio.Task[Any]") -> Iterator[str]:
    awaited: Any = task.get_coro()
    for _ in range(MAX_FRAMES):
        frame: FrameType | None = _first_of(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = _first_of(awaited, "cr_await", "gi_yieldfrom", "ag_await")


def _first_of(awaited: Any, *names: str) -> Any:
    """Return the first of these attributes that is there and is not None."""
    return next((found for name in names if (found := getattr(awaited, name, None))), None)


if __name__ == "__main__":
    ask(int(sys.argv[1]))
