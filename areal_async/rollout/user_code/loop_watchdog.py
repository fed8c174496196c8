"""Watching the event loop: how late it is, and what holds it up.

Thousands of streams share one loop; a workflow that computes instead of awaiting stops them all. The measure runs on
the loop, the watch beside it, since a blocked loop cannot report itself: in a thread, and for what holds the
interpreter's lock as well (a regular expression gone wild) in the handler of a timer of the process's own work.
"""

import asyncio
import math
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

import anyio
import structlog

from areal_async.rollout.user_code.boundary import encodable
from areal_async.rollout.user_code.loop_block_report import (
    ENDED_BY_WATCH,
    ENDED_FOR_CULPRIT,
    LoopBlock,
    LoopBlockFile,
    Work,
)
from areal_async.rollout.user_code.task_scope import scope_of

BEAT_S = 0.1
WINDOW_BEATS = 100
"""Ten seconds."""
BLOCKED_S = 1.0
TOLD_S = 2.0
"""A loop that stands still for longer is told to the user at once; a shorter stop is in the log."""
MEETING_S = 0.5
"""How long the thread and the signal's handler wait for each other. While the handler waits, the thread can run."""
MAX_STACK_FRAMES = 8
_OURS = str(Path(__file__).parents[2])
_NOT_THE_USERS = (_OURS, "<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))

log = structlog.get_logger()


class Lag(NamedTuple):
    """How late the loop was lately, in seconds."""

    p99_s: float
    max_s: float


class Look(NamedTuple):
    """When the watch looked."""

    at_s: float
    worked_s: float
    """Processor time of the whole process, and time in the queue for a processor of the threads that matter."""

    @classmethod
    def now(cls, thread_ids: Iterable[int] = ()) -> Self:
        """``thread_ids``: the kernel's, of the threads that matter."""
        return cls(at_s=time.monotonic(), worked_s=time.process_time() + sum(map(_queued_s, thread_ids)))

    def found_stopped_since(self, before: "Look") -> bool:
        """Say whether this process was stopped for a while. One that computes in a library holds up the thread too."""
        late_s = self.at_s - before.at_s - BLOCKED_S / 4
        return late_s > BLOCKED_S and self.worked_s - before.worked_s < late_s / 2


class LoopWatchdog:
    """Measures with ``run_beats``, on the loop; reports blocking while ``watching``. Make it on the loop's thread."""

    def __init__(self, *, deadline_s: float = math.inf, file: LoopBlockFile | None = None) -> None:
        """Take when and what to tell.

        Args:
            deadline_s: a loop that stands still for longer is ended with its process; nothing in it could.
            file: takes what holds up the loop, and whose slot that is; it stays when the process is ended.
        """
        self._deadline_s = deadline_s
        self._file = file
        self._lags_s: deque[float] = deque(maxlen=WINDOW_BEATS)
        self._last_beat_s = time.monotonic()
        self._loop_thread_id = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = threading.Lock()
        self._thread_ids = [threading.get_native_id()]
        self._looked = Look.now(self._thread_ids)
        self._logged_beat_s = 0.0
        self._told_beat_s = 0.0
        self._has_timer = False

    @property
    def lag(self) -> Lag:
        """Over the last ten seconds."""
        ordered = sorted(self._lags_s) or [0.0]
        return Lag(p99_s=ordered[int(0.99 * (len(ordered) - 1))], max_s=ordered[-1])

    async def run_beats(self) -> None:
        """Measure until cancelled."""
        while True:
            before = time.monotonic()
            self._last_beat_s = before
            if self._has_timer:  # it goes off when the process works for so long without a beat
                signal.setitimer(signal.ITIMER_VIRTUAL, BLOCKED_S, BLOCKED_S / 4)
            await anyio.sleep(BEAT_S)
            self._lags_s.append(max(0.0, time.monotonic() - before - BEAT_S))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log a warning, with the loop's stack, each time it stands still for more than a second."""
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        stop = threading.Event()
        self._last_beat_s = time.monotonic()
        self._looked = Look.now(self._thread_ids)
        thread = threading.Thread(target=self._watch, args=(stop,), name="loop-watch", daemon=True)
        thread.start()
        try:
            with self._timed():
                yield
        finally:
            stop.set()
            thread.join()
            self._forget()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Look from the main thread as well, where a signal comes through to what lets no other thread run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGVTALRM, lambda _, frame: self._look(frame))
        self._has_timer = True
        try:
            yield
        finally:
            self._has_timer = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    def _watch(self, stop: threading.Event) -> None:
        self._thread_ids = [*self._thread_ids[:1], threading.get_native_id()]
        while not stop.wait(BLOCKED_S / 4):
            self._look(sys._current_frames().get(self._loop_thread_id))

    def _look(self, frame: FrameType | None) -> None:
        """Report what stands on the loop at ``frame``, where it has stood there for long."""
        if not self._looking.acquire(timeout=MEETING_S):
            return
        try:
            before, self._looked = self._looked, Look.now(self._thread_ids)
            if self._looked.found_stopped_since(before):  # with everything else of this process: no fault of the loop
                self._last_beat_s = self._looked.at_s
            beat_s = self._last_beat_s
            blocked_s = self._looked.at_s - beat_s
            if beat_s != self._told_beat_s:
                self._forget()
            if blocked_s <= BLOCKED_S:
                return
            block = self._block(frame, blocked_s)
            if beat_s != self._logged_beat_s:
                self._logged_beat_s = beat_s
                self._log("warning", "loop.blocked", block, frame)
            if blocked_s > TOLD_S and beat_s != self._told_beat_s:
                self._told_beat_s = beat_s
                self._write(block)
            if blocked_s > self._deadline_s:
                self._write(block)
                self._log("critical", "loop.ended", block, frame)
                os._exit(ENDED_FOR_CULPRIT if block.work and self._file else ENDED_BY_WATCH)
        finally:
            self._looking.release()

    def _block(self, frame: FrameType | None, blocked_s: float) -> LoopBlock:
        node_id = self._file.node_id if self._file else ""
        return LoopBlock(node_id=node_id, blocked_s=blocked_s, place=_place(frame), work=self._work())

    def _work(self) -> Work | None:
        """Return what the task that stands on the loop is for."""
        task = asyncio.current_task(self._loop) if self._loop else None
        scope = scope_of(task) if task else None
        return scope.work if scope and isinstance(scope.work, Work) else None

    def _log(self, level: str, event: str, block: LoopBlock, frame: FrameType | None) -> None:
        work = {"workflow": block.work.workflow, "slot": block.work.name} if block.work else {}
        getattr(log, level)(
            event,
            blocked_s=round(block.blocked_s, 2),
            **work,
            place=block.place,
            frames=_frames(frame),
        )

    def _write(self, block: LoopBlock) -> None:
        if self._file is not None:
            try:
                self._file.write(block)
            except OSError as exc:  # a full disk: the log has it, and the process is to be ended all the same
                log.warning("blockage.unwritable", error=str(exc))

    def _forget(self) -> None:
        """The loop moves again."""
        if self._told_beat_s and self._file is not None:
            with suppress(OSError):
                self._file.remove()
        self._told_beat_s = 0.0


def _queued_s(thread_id: int) -> float:
    """Return how long a thread was ready to run and had no processor; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _place(frame: FrameType | None) -> str:
    """Name the innermost line of user code, or the innermost line at all."""
    stack = list(traceback.walk_stack(frame)) if frame else []
    if not stack:
        return "unknown"
    users = [one for one in stack if not one[0].f_code.co_filename.startswith(_NOT_THE_USERS)]
    inner, line = (users or stack)[0]
    return encodable(f"{inner.f_code.co_filename}:{line} {inner.f_code.co_name}")


def _frames(frame: FrameType | None) -> list[str]:
    frames = traceback.extract_stack(frame)[-MAX_STACK_FRAMES:] if frame else []
    return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in frames]
