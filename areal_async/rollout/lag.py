"""Watching the event loop: how late it is, and what holds it up.

Thousands of streams share one loop; a workflow that computes instead of awaiting stops them all. The
measure runs on the loop, the watch in a thread of its own, since a blocked loop cannot report itself.
"""

import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import anyio
import structlog

BEAT_S = 0.1
WINDOW_BEATS = 100
"""Ten seconds."""
BLOCKED_S = 1.0
MAX_STACK_FRAMES = 8
ENDED_BY_WATCH = 70
"""Exit status of a process whose loop stood still for too long."""

log = structlog.get_logger()


class Lag(NamedTuple):
    """How late the loop was lately, in seconds."""

    p99_s: float
    max_s: float


class Look(NamedTuple):
    """When the thread looked."""

    at_s: float
    worked_s: float
    """Of a processor, by the whole process."""

    @classmethod
    def now(cls) -> Self:
        return cls(at_s=time.monotonic(), worked_s=time.process_time())

    def found_stopped_since(self, before: "Look") -> bool:
        """Say whether this process was stopped for a while. One that computes in a library holds up the thread too."""
        late_s = self.at_s - before.at_s - BLOCKED_S / 4
        return late_s > BLOCKED_S and self.worked_s - before.worked_s < late_s / 2


class LoopWatch:
    """Measures with ``run_beats``, on the loop; reports blocking from a thread while ``watching``."""

    def __init__(self, *, deadline_s: float = math.inf) -> None:
        """``deadline_s``: a loop that stands still for longer is ended with its process; nothing in it could."""
        self._deadline_s = deadline_s
        self._lags_s: deque[float] = deque(maxlen=WINDOW_BEATS)
        self._last_beat_s = time.monotonic()
        self._loop_thread_id = threading.get_ident()

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
            await anyio.sleep(BEAT_S)
            self._lags_s.append(max(0.0, time.monotonic() - before - BEAT_S))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log a warning, with the loop's stack, each time it stands still for more than a second."""
        stop = threading.Event()
        self._last_beat_s = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(stop,), name="loop-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        reported_beat_s = 0.0
        looked = Look.now()
        while not stop.wait(BLOCKED_S / 4):
            before, looked = looked, Look.now()
            if looked.found_stopped_since(before):  # with everything else of this process: no fault of the loop
                self._last_beat_s = looked.at_s
            beat_s = self._last_beat_s
            blocked_s = time.monotonic() - beat_s
            if blocked_s > BLOCKED_S and beat_s != reported_beat_s:
                reported_beat_s = beat_s
                log.warning("loop.blocked", blocked_s=round(blocked_s, 2), frames=self._frames())
            if blocked_s > self._deadline_s:
                log.critical("loop.ended", blocked_s=round(blocked_s, 2), frames=self._frames())
                os._exit(ENDED_BY_WATCH)

    def _frames(self) -> list[str]:
        frame = sys._current_frames().get(self._loop_thread_id)
        frames = traceback.extract_stack(frame)[-MAX_STACK_FRAMES:] if frame else []
        return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in frames]
