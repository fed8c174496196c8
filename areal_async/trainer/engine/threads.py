"""Where the trainer's blocking work runs: the engine's one thread, and single jobs beside the ring."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio
import anyio.abc
import torch

T = TypeVar("T")


class EngineThread:
    """The one thread of torch work on a device: the loop stays free, collectives stay in order."""

    def __init__(self, device: torch.device, name: str = "engine", *, is_aside: bool = False) -> None:
        """Begin without a thread, which comes with the first work.

        Args:
            is_aside: on a GPU its work is ordered among itself alone, and waits for none of the other threads'.
        """
        self.device = device
        take = functools.partial(_take, device, is_aside=is_aside)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=take)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. A cancelled call goes on in its thread until it ends by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _take(device: torch.device, *, is_aside: bool) -> None:
    # CUDA keeps the current device for each thread: streams and contexts would be made on the first GPU else.
    torch.get_device_module(device).set_device(device)
    if is_aside and device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # a thread's own too; all share one else


class BackgroundJob:
    """One job at a time that goes on while its starter does something else. What it raises ends the task group."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._done = anyio.Event()
        self._done.set()

    @property
    def is_idle(self) -> bool:
        """Whether no job goes on."""
        return self._done.is_set()

    async def start(self, job: Callable[[], Awaitable[None]]) -> None:
        """Start ``job`` as soon as the one before it has ended."""
        await self.finish()
        self.start_now(job)

    def start_now(self, job: Callable[[], Awaitable[None]]) -> None:
        """Start ``job``, as none goes on."""
        assert self.is_idle
        self._done = anyio.Event()
        self._tasks.start_soon(self._run, job)

    async def finish(self) -> None:
        """Wait until the last job has ended well; one that failed cancels the waiter."""
        await self._done.wait()

    async def _run(self, job: Callable[[], Awaitable[None]]) -> None:
        await job()
        self._done.set()
