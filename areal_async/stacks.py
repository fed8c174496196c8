"""Where a process stands, written on request: SIGUSR1 adds the stacks of all its threads and tasks to a file.

    kill -USR1 <pid>; less runs/<name>/logs/stacks-node-0.txt

Threads are written by the signal handler itself, so also by a process whose event loop is held up, or that waits inside
a library. Tasks are added as soon as Python code runs again. Invariant: ``ask`` never ends who is asked, as the signal
would do to a process that has not come to ``install`` yet.
"""

import asyncio
import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

MAX_FILE_BYTES = 1 << 20
"""Beyond it the file begins anew with the next process."""
MAX_STACKS = 200
"""Different stacks of tasks that are written; how many tasks stand at the same place is a number."""
MAX_FRAMES = 30


def path_for(run_directory: Path, name: str) -> Path:
    """Return the file of one process of a run."""
    return run_directory / "logs" / f"stacks-{name}.txt"


def install(path: Path) -> None:
    """Take SIGUSR1 in this process from now on. Call from the main thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_full = path.exists() and path.stat().st_size > MAX_FILE_BYTES
    file = path.open("w" if is_full else "a")  # for as long as the process lives: a signal handler cannot open it
    signal.signal(signal.SIGUSR1, lambda *_: _write_tasks(file))
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=True)


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


def _write_tasks(file: IO[str]) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        tasks = set()
    file.write(f"\nprocess {os.getpid()}, {len(tasks)} tasks\n\n{task_stacks(tasks)}\n")
    file.flush()


def _frames(task: "asyncio.Task[Any]") -> Iterator[str]:
    awaited: Any = task.get_coro()
    for _ in range(MAX_FRAMES):
        frame: FrameType | None = next(
            (found for name in ("cr_frame", "gi_frame", "ag_frame") if (found := getattr(awaited, name, None))), None
        )
        if frame is None:
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = next(
            (found for name in ("cr_await", "gi_yieldfrom", "ag_await") if (found := getattr(awaited, name, None))),
            None,
        )
