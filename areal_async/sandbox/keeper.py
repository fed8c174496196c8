"""One keeper of boxes from the outside, and the keepers that a process has: warm, and a bounded number of them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.to_thread
import structlog

from areal_async.sandbox.worker import HERE, START_DEADLINE_S, SandboxGone, WarmSandbox, cpu_s_below

MAX_BOXES: Final = 64
"""At once in one process, unless ``set_max_boxes`` says another number."""
MAX_IDLE: Final = 8
"""Keepers that wait for a box; one more ends."""
TOLD_AFTER_S: Final = 5.0
"""Wait for a box after which the log tells of it."""

log = structlog.get_logger()


class BoxKeeper(WarmSandbox):
    """A warm sandbox that keeps one box at a time."""

    INSIDE = {
        "servers": {f"/areal_async/sandbox/{name}": str(HERE / name) for name in ("keep.py", "init.py", "trees.py")},
        # the second: a box may close its folders to its own user, and is to be copied all the same
        "capabilities": ["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"],
        "folders": [
            *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/share", "/usr/libexec", "/usr/include"),
            "/etc/alternatives",
        ],
        "places": ["/box/saved", "/box/live", "/box/root", "/box/etc"],
    }
    can_overlay = False
    """Whether a reset lays an empty file system over the snapshot; else it copies the snapshot."""
    began_cpu_s = 0.0
    """Processor time that it had used before it was lent: it is looked at when nobody waits for its box."""

    def _is_ready(self, answer: bytes) -> None:
        self.can_overlay = bool(json.loads(answer)["can_overlay"])

    async def ask(self, request: dict[str, Any], files: list[int] | None = None) -> None:
        """Have a box ended, and with ``start`` another started.

        Raises:
            SandboxGone: it does not answer.
        """
        is_answered = False
        if "start" in request and self._group is not None:  # the kernel keeps what it may need again of what was before
            self._own_bytes = await self._held_bytes()
        try:
            with anyio.fail_after(START_DEADLINE_S):
                await self._send(json.dumps(request).encode(), files)
                await self._receive()
                is_answered = True
        except TimeoutError:
            raise SandboxGone("did not answer in time") from None
        finally:
            if not is_answered:
                await self.stop()

    async def used_cpu_s(self) -> float:
        """Return the processor time that it and its boxes have used."""
        assert self._process is not None
        return await anyio.to_thread.run_sync(cpu_s_below, self._process.pid)

    async def held_bytes(self) -> int:
        """Return what its box holds of memory.

        Raises:
            OSError: it has ended.
        """
        return await self._held_bytes() - self._own_bytes


class BoxKeepers:
    """The keepers of a process: a box has one to itself, and one that waits needs no start."""

    def __init__(self, max_boxes: int = MAX_BOXES) -> None:
        self._turns = anyio.CapacityLimiter(max_boxes)
        self._idle: list[BoxKeeper] = []
        self.trying: Final = anyio.Lock()
        self.is_tried = False
        """Whether the walls were tried."""

    def set_max_boxes(self, most: int) -> None:
        """Have at most so many boxes at once from now on."""
        self._turns.total_tokens = most

    @asynccontextmanager
    async def keeper(self) -> AsyncIterator[BoxKeeper]:
        """Wait for a turn and lend a keeper without a box.

        Raises:
            UserError: this machine cannot isolate programs.
        """
        holder = object()
        await self._wait_for_turn(holder)
        try:
            keeper = self._idle.pop() if self._idle else BoxKeeper()
            try:
                if not keeper.is_running:
                    await keeper.stop()
                    await keeper.start()
                    keeper.began_cpu_s = await keeper.used_cpu_s()
                yield keeper
            finally:
                await self._take_back(keeper)
        finally:
            self._turns.release_on_behalf_of(holder)

    async def _wait_for_turn(self, holder: object) -> None:
        with anyio.move_on_after(TOLD_AFTER_S):
            await self._turns.acquire_on_behalf_of(holder)
            return
        state = self._turns.statistics()
        log.warning("sandbox.waiting", boxes=int(state.borrowed_tokens), max_boxes=int(state.total_tokens))
        await self._turns.acquire_on_behalf_of(holder)

    async def _take_back(self, keeper: BoxKeeper) -> None:
        with anyio.CancelScope(shield=True):
            try:
                if keeper.is_running:
                    await keeper.ask({})
                    keeper.began_cpu_s = await keeper.used_cpu_s()
            except SandboxGone as exc:
                log.warning("sandbox.gone", cause=str(exc))
            if keeper.is_running and len(self._idle) < MAX_IDLE:
                self._idle.append(keeper)
            else:
                await keeper.stop()

    async def aclose(self) -> None:
        """End those that wait."""
        while self._idle:
            await self._idle.pop().stop()


KEEPERS: Final = BoxKeepers()
"""Of this process. They end with the thread that started them."""


def set_max_boxes(most: int) -> None:
    """Have at most so many boxes at once in this process from now on; who wants one more waits."""
    KEEPERS.set_max_boxes(most)
