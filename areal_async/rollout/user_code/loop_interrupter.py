"""User code that holds up the event loop of this process is ended where it stands, by an exception.

For a process that serves one user, who wants to be told the line; a node, which has others' work on its loop, ends
(``loop_watchdog``). A thread sees that the loop does not come to say that it runs, and sends a signal to the main
thread. Its handler runs inside whatever holds the loop up, also inside ``time.sleep`` and ``while True``; code that is
not the user's is let alone. The signal is SIGUSR2: alarms are used by libraries that bound their own work.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import anyio

from areal_async.errors import WorkflowError
from areal_async.rollout.user_code.source_location import UserCode

BEATS_PER_DEADLINE = 10
MAX_BEAT_S = 1.0


class LoopInterrupter:
    """``run_beats`` on the loop, inside ``watching``. Made and used in the main thread."""

    def __init__(self, user_code: UserCode, *, deadline_s: float) -> None:
        self._user_code = user_code
        self._deadline_s = deadline_s
        self._interval_s = min(MAX_BEAT_S, deadline_s / BEATS_PER_DEADLINE)
        self._last_beat_s = time.monotonic()
        self._main_thread_id = threading.get_ident()

    async def run_beats(self) -> None:
        """Say that the loop runs, until cancelled."""
        while True:
            self._last_beat_s = time.monotonic()
            await anyio.sleep(self._interval_s)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take SIGUSR2 for as long as the block runs."""
        stop = threading.Event()
        before = signal.signal(signal.SIGUSR2, self._on_signal)
        self._last_beat_s = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(stop,), name="loop-interrupter", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            signal.signal(signal.SIGUSR2, before)

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            if time.monotonic() - self._last_beat_s > self._deadline_s:
                self._last_beat_s = time.monotonic()  # so long again for what is held up next
                signal.pthread_kill(self._main_thread_id, signal.SIGUSR2)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        place = self._user_code.innermost(frame)
        if place is not None:
            raise WorkflowError(
                f"held up the event loop for rollout.loop_deadline_s = {self._deadline_s:g} s, at {place}; await what "
                "takes long, or run it in a thread (anyio.to_thread.run_sync) or as a @reward"
            )
