"""The model thread: the only one that touches the scheduler, the model and the cache.

Commands enter through a queue and run between two steps; pieces leave in one call to the event loop per step, however
many streams they belong to.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from areal_async.inference.embedded.engine.scheduler import Emission, Scheduler

T = TypeVar("T")

_THROUGHPUT_WINDOW_S = 1.0


class ModelThread:
    """Runs a scheduler until told to stop."""

    def __init__(self, scheduler: Scheduler, *, on_death: Callable[[], None]) -> None:
        """Bind to the running event loop.

        Args:
            on_death: called on the loop when the thread ends without being told to; its traceback is printed by
                ``threading.excepthook``.
        """
        self.scheduler = scheduler
        self.throughput = 0.0
        """Generated tokens per second, over the last second."""
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[Scheduler], object]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still serves."""
        return self._thread.is_alive()

    def post(self, command: Callable[[Scheduler], object]) -> None:
        """Run ``command`` between two steps, without an answer."""
        self._commands.put(command)

    async def call(self, command: Callable[[Scheduler], T]) -> T:
        """Run ``command`` between two steps and return its result.

        Raises:
            RuntimeError: the thread is dead.
        """
        if not self.is_alive:
            raise RuntimeError("the model thread has ended; restart the server")
        answer: Future[T] = Future()

        def run(scheduler: Scheduler) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(command(scheduler))

        self.post(run)
        return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """Ask the thread to end after the current step."""
        self._is_stopping = True
        self.post(lambda scheduler: None)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._serve()
        finally:
            if not self._is_stopping:
                self._loop.call_soon_threadsafe(self._on_death)

    def _serve(self) -> None:
        counted_at, counted_tokens = time.monotonic(), 0
        while not self._is_stopping:
            self._run_commands()
            if self.scheduler.has_work:
                self.scheduler.step()
            emissions = self.scheduler.take_emissions()
            if emissions:
                self._loop.call_soon_threadsafe(_deliver, emissions)
            elapsed_s = time.monotonic() - counted_at
            if elapsed_s >= _THROUGHPUT_WINDOW_S:
                total = self.scheduler.num_generated_tokens
                self.throughput = (total - counted_tokens) / elapsed_s
                counted_at, counted_tokens = time.monotonic(), total

    def _run_commands(self) -> None:
        """Run what is queued; without work, wait for something to be."""
        if not self.scheduler.has_work:
            self.throughput = 0.0 if self.scheduler.num_running == 0 else self.throughput
            self._commands.get()(self.scheduler)
        while not self._commands.empty():
            self._commands.get()(self.scheduler)


def _deliver(emissions: list[Emission]) -> None:
    for sequence, piece in emissions:
        sequence.emit(sequence, piece)
