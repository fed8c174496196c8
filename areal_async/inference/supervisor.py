"""Keeps one server alive, healthy and on the newest weights.

Level-triggered: each turn looks at what is announced and what the server holds, and closes the gap, so a
lost event, a restart and a late joiner are one case. Invariant: ``on_state`` is told of a version after the
server holds it, never before; a server that failed returns only with the current version verified.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import httpx
import structlog

from areal_async.errors import PipelineError
from areal_async.inference.commands import ServerCommand
from areal_async.inference.concurrency import ConcurrencyLimit
from areal_async.inference.faults import ServerFault, StagingFault
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import Pool, Server
from areal_async.inference.servers import HEALTH_DEADLINE_S, ServerProcess
from areal_async.inference.swap import Staging, SwapTimes, swap
from areal_async.settings import InferenceSettings
from areal_async.types import WeightsVersion

HEALTH_INTERVAL_S = 5.0
RECHECK_S = 1.0
MAX_FAILED_CHECKS = 3
MAX_FAILED_REQUESTS = 4
"""A server can claim to be healthy and answer nobody; this many doubts in a row are not coincidence."""
LOADS_INTERVAL_S = 1.0
STAGING_RETRY_S = 2.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
"""More than ``MAX_RESTARTS`` within this time end the node."""
MAX_BACKOFF_S = 30.0

log = structlog.get_logger()


class Target:
    """The newest announced weights version, for all servers of the node."""

    def __init__(self) -> None:
        self.newest: WeightsVersion | None = None
        self._changed = anyio.Event()

    def announce(self, version: WeightsVersion) -> None:
        """Have every server change to ``version``."""
        self.newest = version
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_other_than(self, version: str) -> WeightsVersion:
        """Return the newest version as soon as it is not ``version``."""
        while self.newest is None or self.newest.version == version:
            await self._changed.wait()
        return self.newest


class Supervisor:
    """The one task that starts, swaps, fences and restarts a server."""

    def __init__(
        self,
        server: Server,
        command: ServerCommand,
        *,
        pool: Pool,
        target: Target,
        staging: Staging,
        administration: httpx.AsyncClient,
        settings: InferenceSettings,
        log_path: Path,
        on_state: Callable[[Server], Awaitable[None]],
    ) -> None:
        self._server = server
        self._command = command
        self._pool = pool
        self._target = target
        self._staging = staging
        self._api = ServerApi(administration, "")
        self._settings = settings
        self._log_path = log_path
        self._on_state = on_state
        self._limit = ConcurrencyLimit(settings.max_running_requests)
        server.limit = self._limit.value
        self._is_swapping = False

    async def run(self) -> None:
        """Serve for ever.

        consumes:     announced weights versions
        waits for:    the server
        produces:     a serviceable server, and its state
        unblocked by: cancellation; then the server is stopped

        Raises:
            UserError: the server cannot even start.
            PipelineError: it fails again and again.
        """
        failures: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        while True:
            process = ServerProcess(self._command, log_path=self._log_path)
            try:
                await self._fence("starting")
                await process.start(self._api, deadline_s=self._settings.start_deadline_s)
                reason = await self._serve(process)
                failures.append(time.monotonic())
                log.warning("server.failed", server_id=self._server.id, reason=reason)
                await self._fence(reason)
            finally:
                await process.stop()
            recent = sum(1 for at in failures if at > time.monotonic() - RESTART_WINDOW_S)
            if recent > MAX_RESTARTS:
                raise PipelineError(
                    f"inference server {self._server.id}: failed {recent} times within {RESTART_WINDOW_S:g} s, "
                    f"last: {reason}; its log is {self._log_path}"
                )
            await anyio.sleep(min(MAX_BACKOFF_S, 0.5 * 2 ** (recent - 1)))

    async def _serve(self, process: ServerProcess) -> str:
        """Keep the running server current until it has to be restarted; return why."""
        reasons: list[str] = []

        async def watch(failure: Callable[[], Awaitable[str]]) -> None:
            reasons.append(await failure())
            watchers.cancel_scope.cancel()

        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._run_loads)
            for failure in (process.wait_ended, self._run_health, self._run_weights):
                watchers.start_soon(watch, failure)
        return reasons[0]

    async def _run_health(self) -> str:
        """Look at the server now and then, and at once when a request to it failed."""
        num_failed_checks = num_failed_requests = num_tokens_at_doubt = 0
        while True:
            if num_failed_checks:
                await anyio.sleep(RECHECK_S)
            else:
                with anyio.move_on_after(HEALTH_INTERVAL_S):
                    await self._server.doubted.wait()
            if not await self._api.is_healthy(deadline_s=HEALTH_DEADLINE_S):
                if self._is_swapping:  # SGLang's check generates, which a pause holds up; a swap has its own deadline
                    await anyio.sleep(RECHECK_S)
                    continue
                num_failed_checks += 1
                if num_failed_checks == MAX_FAILED_CHECKS:
                    return f"failed {num_failed_checks} health checks in a row"
                continue
            num_failed_checks = 0
            if self._server.doubted.is_set():
                num_tokens = self._server.num_generated_tokens
                num_failed_requests = num_failed_requests + 1 if num_tokens == num_tokens_at_doubt else 1
                num_tokens_at_doubt = num_tokens
                if num_failed_requests == MAX_FAILED_REQUESTS:
                    return f"failed {num_failed_requests} requests without a token between, last: {self._server.doubt}"
                self._pool.clear_doubt(self._server)

    async def _run_loads(self) -> None:
        """Send it as much as it says it can do. One that does not say gets what its settings allow."""
        while True:
            await anyio.sleep(LOADS_INTERVAL_S)
            if self._is_swapping or not self._server.is_serviceable:
                continue
            num_requests = self._server.num_requests
            try:
                load = await self._api.load(deadline_s=HEALTH_DEADLINE_S)
            except ServerFault as exc:
                log.debug("server.load_unknown", server_id=self._server.id, cause=str(exc))
                continue
            if self._is_swapping:  # paused: what waits there now says nothing
                continue
            before = self._server.limit
            limit = self._limit.observe(load, num_requests=num_requests)
            if limit != before:
                log.debug("server.limited", server_id=self._server.id, limit=limit, num_waiting=load.num_waiting)
                self._pool.set_limit(self._server, limit)

    async def _run_weights(self) -> str:
        """Change to every version that is announced."""
        while True:
            target = await self._target.wait_other_than(self._server.version)
            try:
                stage_s = await self._staging.check(target)
                times = await self._swap(target)
            except StagingFault as exc:
                # Replaced by a newer one meanwhile, or not visible on this host yet: look again.
                log.warning("weights.unreadable", server_id=self._server.id, cause=str(exc))
                await anyio.sleep(STAGING_RETRY_S)
                continue
            except ServerFault as exc:
                if self._target.newest is not target and await self._api.is_healthy(deadline_s=HEALTH_DEADLINE_S):
                    log.info("swap.superseded", server_id=self._server.id, version=target.version, cause=str(exc))
                    continue
                return f"swap to {target.version}: {exc}"
            self._pool.admit(self._server, url=self._api.url, version=target.version)
            log.info(
                "server.swapped", server_id=self._server.id, version=target.version, stage_s=round(stage_s, 4),
                pause_s=round(times.pause_s, 4), transfer_s=round(times.transfer_s, 4),
                resume_s=round(times.resume_s, 4),
            )  # fmt: skip
            await self._on_state(self._server)

    async def _swap(self, target: WeightsVersion) -> SwapTimes:
        self._is_swapping = True
        try:
            return await swap(
                self._api, target, mode=self._settings.interrupt, deadline_s=self._settings.start_deadline_s
            )
        finally:
            self._is_swapping = False

    async def _fence(self, reason: str) -> None:
        self._pool.fence(self._server, reason)
        await self._on_state(self._server)
