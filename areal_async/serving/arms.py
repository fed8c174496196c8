"""An arm: what a person has named, the version that it is now, and how it becomes another one.

Level-triggered: a look at what is meant, now and then, and the gap is closed. Invariants: an answer has one version
from its first token to its last; a request that has come is answered, whatever becomes of its arm meanwhile; there is
one fleet more than there are arms at the most, and none more where a fleet changes its weights in place.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from areal_async.config.settings import Settings
from areal_async.errors import PipelineError
from areal_async.process.bell import Bell
from areal_async.serving.folders import Versions
from areal_async.serving.served_version import ServedVersion
from areal_async.serving.split import Share

RETRY_S = 30.0
"""Time after which a version that could not be had is tried again, unless another one is meant by then."""

log = structlog.get_logger()


@dataclass(kw_only=True)
class Place:
    """Where arms have their servers, and what they share."""

    settings: Settings
    versions: Versions
    log_directory: Path
    is_beside: bool
    """Whether servers of a new version start beside those of the old one."""
    num_arms: int
    tell: Callable[[str], None]
    """Takes what the user should know."""
    kind: type[ServedVersion] = ServedVersion
    retry_s: float = RETRY_S
    num_started: int = 0
    """Fleets so far, by which their names differ."""
    free: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)
    """Numbers of the fleets that may be started now: each has GPUs of its own, where there are any."""

    def __post_init__(self) -> None:
        for number in range(self.num_arms + self.is_beside):
            self.free.put_nowait(number)


class Arm:
    """One arm. ``start`` it, then have ``run`` follow what is meant."""

    def __init__(self, share: Share, place: Place, tasks: anyio.abc.TaskGroup) -> None:
        """Take the group that its servers run in: servers that fail again and again end it."""
        self.name, self.share = share
        self._place = place
        self._tasks = tasks
        self._served: ServedVersion | None = None
        self._alive: dict[str, ServedVersion] = {}
        """Those whose servers run, by version."""
        self._is_open = True
        self._opened = Bell()
        self._lease = AsyncExitStack()
        """Holds the folder of weights that were loaded in place."""
        self._failed, self._retry_at_s, self._told = "", 0.0, ""

    @property
    def version(self) -> str:
        """The version that answers; empty before the first does."""
        return self._served.version if self._served is not None else ""

    @property
    def alive(self) -> Sequence[ServedVersion]:
        """Those whose servers run: the one that answers, and those that leave."""
        return list(self._alive.values())

    @property
    def is_ready(self) -> bool:
        """Whether its servers run; a request that comes now may have to wait for their weights."""
        return self._served is not None and self._served.num_serviceable > 0

    async def start(self) -> None:
        """Have the version answer that is meant now.

        Raises:
            PipelineError: there is none, or its servers do not start.
        """
        wanted = await self._resolve()
        self._served = await self._start(wanted)
        self._place.tell(f"{self.name}: version {wanted} answers")

    async def run(self) -> None:
        """Follow what is meant.

        consumes:     what the name stands for, as it moves
        waits for:    a place for a fleet, its start, the answers that have begun
        produces:     answers of the version that is meant
        unblocked by: cancellation
        """
        async with self._lease:
            while True:
                await anyio.sleep(self._place.settings.serve.follow_s)
                await self._look()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[ServedVersion]:
        """Have the version that answers a request which begins now, for as long as it takes."""
        while not self._is_open:
            await self._opened.wait()
        assert self._served is not None
        with self._served.answering():
            yield self._served

    async def _resolve(self) -> str:
        return await anyio.to_thread.run_sync(self._place.versions.resolve, self.name)

    async def _look(self) -> None:
        """Become what is meant, where that is another version and it can be had."""
        before, wanted = self.version, ""
        try:
            wanted = await self._resolve()
            is_to_wait = wanted == self._failed and anyio.current_time() < self._retry_at_s
            if wanted == before or is_to_wait or not self._has_place(wanted):
                return
            await (self._move(wanted) if self._place.is_beside else self._change(wanted))
        except (PipelineError, OSError) as exc:  # a disk that is full, or gone for a moment, stops no answer either
            self._failed, self._retry_at_s = wanted, anyio.current_time() + self._place.retry_s
            self._note_failure(str(exc) or f"version {wanted} could not be loaded in time")
            return
        self._failed = self._told = ""
        log.info("serve.moved", arm=self.name, version=wanted, before=before)
        self._place.tell(f"{self.name}: version {wanted} answers, no longer {before}")

    def _has_place(self, version: str) -> bool:
        """Say whether its servers run or could be started now: it may be another one that is meant when they can."""
        return version in self._alive or not self._place.is_beside or not self._place.free.empty()

    def _tell_new(self, version: str, what: str) -> None:
        """Tell what is done about a version; not again where it has failed before and is tried anew."""
        if version != self._failed:
            self._place.tell(f"{self.name}: version {version}: {what}")

    def _note_failure(self, cause: str) -> None:
        if cause != self._told:
            self._told = cause
            log.warning("serve.not_moved", arm=self.name, version=self.version, cause=cause)
            self._place.tell(f"{self.name}: version {self.version} goes on: {cause}")

    async def _start(self, version: str) -> ServedVersion:
        """Start the servers of a version, once there is a place for them.

        Raises:
            PipelineError: it cannot be had, or its servers do not start.
        """
        number = await self._place.free.get()
        served: ServedVersion = await self._tasks.start(self._run_fleet, version, number)
        self._alive[version] = served
        return served

    async def _run_fleet(self, version: str, number: int, *, task_status: anyio.abc.TaskStatus[ServedVersion]) -> None:
        place = self._place
        place.num_started += 1
        self._tell_new(version, "its weights are made ready")
        try:
            async with place.versions.held(version) as folder:
                self._tell_new(version, f"its servers start, with logs in {place.log_directory}")
                served = place.kind(
                    version,
                    folder,
                    place.settings,
                    name=f"{self.name}_{place.num_started}".replace("-", "_"),
                    log_directory=place.log_directory,
                    first_gpu=number * place.settings.inference.num_gpus,
                    max_streams=place.settings.serve.max_requests,
                    is_frozen=place.is_beside,
                )
                await served.run(task_status=task_status)
        finally:
            place.free.put_nowait(number)

    async def _move(self, wanted: str) -> None:
        """Have servers beside the old ones answer, which end after their last answer."""
        before = self._served
        assert before is not None
        # One that leaves can come back: its servers run while it still has an answer to give.
        self._served = self._alive.get(wanted) or await self._start(wanted)
        self._tasks.start_soon(self._see_off, before)

    async def _see_off(self, served: ServedVersion) -> None:
        await served.wait_idle()
        if served is not self._served and self._alive.get(served.version) is served:
            del self._alive[served.version]
            served.end()

    async def _change(self, wanted: str) -> None:
        """Give the servers other weights, while requests wait and none is answered."""
        served = self._served
        assert served is not None
        async with AsyncExitStack() as lease:
            self._tell_new(wanted, "its weights are made ready")
            folder = await lease.enter_async_context(self._place.versions.held(wanted))
            self._tell_new(wanted, "its weights are loaded once the answers that have begun are over")
            self._is_open = False
            try:
                await served.wait_idle()
                await served.change(wanted, folder, deadline_s=self._place.settings.inference.start_deadline_s)
            finally:
                self._is_open = True
                self._opened.ring()
            self._alive = {wanted: served}
            await self._lease.aclose()
            self._lease.push_async_exit(lease.pop_all())
