"""Keeps one server alive, healthy and sent as much as it can do, and has it kept on the newest weights.

Invariant: a server that failed is fenced before anything else happens to it; so has one that hangs, which is unhealthy,
gives nobody a token until a stream's deadline, or does not answer an update. One that served is started again however
often it dies; one that never gets to serve is given up after a few starts, with its cause.
"""

from collections.abc import Awaitable, Callable
from uuid import uuid4

import anyio
import structlog

from areal_async.errors import PipelineError, UserError
from areal_async.inference.concurrency import ConcurrencyLimit
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import STARTING, ServerHandle
from areal_async.inference.servers import HEALTH_DEADLINE_S, ServerProcess
from areal_async.inference.supervision.updates import FleetContext, Updater

HEALTH_INTERVAL_S = 5.0
RECHECK_S = 1.0
MAX_FAILED_CHECKS = 3
MAX_FAILED_REQUESTS = 4
"""A server can claim to be healthy and answer nobody; this many doubts in a row are not coincidence."""
LOADS_INTERVAL_S = 1.0
MAX_RESTARTS = 5
"""Starts in a row that may end before a token was generated. One more ends the node."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
DYING_S = 2.0
"""A process that ends closes its connections first: so long it may take until it is known how it ended."""

log = structlog.get_logger()


class ServerSupervisor:
    """The one task that starts, watches, fences and restarts a server. Its caller stops the process afterwards."""

    def __init__(self, server: ServerHandle, process: ServerProcess, api: ServerApi, around: FleetContext) -> None:
        """Take ``api`` to point at the process whenever that is started."""
        self._server = server
        self._process = process
        self._api = api
        self._around = around
        self._has_started = False
        self._limit = ConcurrencyLimit(around.settings.max_running_requests)
        server.limit, server.admin_key = self._limit.value, process.command.admin_key

    async def run(self) -> None:
        """Serve until cancelled, through restarts; the server still runs then.

        consumes:     announced weights versions
        waits for:    the server
        produces:     a serviceable server, and its state
        unblocked by: cancellation

        Raises:
            UserError: the server cannot even start.
            PipelineError: it fails again and again, without generating anything between.
        """
        num_fruitless = 0
        while True:
            num_tokens_before = self._server.num_generated_tokens
            reason = await self._run_process()
            log.warning("server.failed", server_id=self._server.id, reason=reason)
            await self._around.fence(self._server, reason)
            await self._process.stop()
            num_fruitless = 0 if self._server.num_generated_tokens > num_tokens_before else num_fruitless + 1
            if num_fruitless > MAX_RESTARTS:
                raise PipelineError(
                    f"inference server {self._server.id}: failed {num_fruitless} times in a row before it generated "
                    f"a token, last: {reason}; its log is {self._process.log_path}"
                )
            if num_fruitless:
                await anyio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (num_fruitless - 1)))

    async def _run_process(self) -> str:
        """Start the server and keep it going until it has to be restarted; return why."""
        settings = self._around.settings
        self._server.incarnation = uuid4().hex
        await self._around.fence(self._server, STARTING)
        await self._around.card.start_using(self._server, self._around.publish)
        try:
            await self._process.start(self._api, silence_s=settings.start_deadline_s, bound_s=settings.start_bound_s)
        except (ServerFault, UserError) as exc:
            if isinstance(exc, UserError) and not self._has_started:
                raise
            return str(exc)
        self._has_started = True
        self._server.context_tokens = await self._ask_context()
        self._updater = Updater(self._server, self._api, self._around)
        return await self._cause(await self._serve())

    async def _cause(self, noticed: str) -> str:
        """Return why the server has to be restarted: how it ended, where it has, whatever was noticed before that.

        One that is killed in the middle of an update breaks the update's connection first.
        """
        if not self._server.fence:
            await self._around.fence(self._server, noticed)
        with anyio.move_on_after(DYING_S):
            return await self._process.wait_ended()
        return noticed

    async def _ask_context(self) -> int | None:
        """Return what the server says of its context; one that says nothing refuses by itself what is too long."""
        try:
            return await self._api.context_tokens(deadline_s=HEALTH_DEADLINE_S)
        except ServerFault as exc:
            log.warning("server.context_unknown", server_id=self._server.id, cause=str(exc))
            return None

    async def _serve(self) -> str:
        reasons: list[str] = []

        async def watch(failure: Callable[[], Awaitable[str]]) -> None:
            reasons.append(await failure())
            watchers.cancel_scope.cancel()

        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._run_loads)
            for failure in (self._process.wait_ended, self._run_health, self._updater.run):
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
                if self._updater.is_updating:
                    # SGLang's check generates, which a pause holds up; an update has deadlines of its own.
                    await anyio.sleep(RECHECK_S)
                    continue
                num_failed_checks += 1
                if num_failed_checks == MAX_FAILED_CHECKS:
                    return f"failed {num_failed_checks} health checks in a row"
                continue
            num_failed_checks = 0
            if self._server.is_silent and not self._updater.is_updating:
                return f"says that it is healthy, and has given nobody a token: {self._server.doubt}"
            if self._server.doubted.is_set():
                num_tokens = self._server.num_generated_tokens
                num_failed_requests = num_failed_requests + 1 if num_tokens == num_tokens_at_doubt else 1
                num_tokens_at_doubt = num_tokens
                if num_failed_requests == MAX_FAILED_REQUESTS:
                    return f"failed {num_failed_requests} requests without a token between, last: {self._server.doubt}"
                self._around.pool.clear_doubt(self._server)

    async def _run_loads(self) -> None:
        """Send it as much as it says it can do. One that does not say gets what its settings allow."""
        while True:
            await anyio.sleep(LOADS_INTERVAL_S)
            if self._updater.is_updating or not self._server.is_serviceable:
                continue
            num_requests = self._server.num_requests
            try:
                load = await self._api.load(deadline_s=HEALTH_DEADLINE_S)
            except ServerFault as exc:
                log.debug("server.load_unknown", server_id=self._server.id, cause=str(exc))
                continue
            if self._updater.is_updating:  # paused: what waits there now says nothing
                continue
            before = self._server.limit
            limit = self._limit.observe(load, num_requests=num_requests)
            if limit != before:
                log.debug("server.limited", server_id=self._server.id, limit=limit, num_waiting=load.num_waiting)
                self._around.pool.set_limit(self._server, limit)
