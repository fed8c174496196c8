"""The servers of one node, those that are wanted at the moment: they join and leave while it runs.

Level-triggered: ``resize`` only says which there are to be, and the loop closes the gap, so that orders which follow
each other quickly are no special case. Invariant: a server that leaves is fenced first, then its requests are ended
there, so that they go on elsewhere from the tokens received, then its process ends; an index that comes back is the
same server again, with the same id and the same GPUs.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import closing
from pathlib import Path

import anyio
import httpx
import structlog

from areal_async.config.settings import Settings
from areal_async.inference.commands import NO_VERSION, has_sha256, server_command
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.servers import ServerProcess
from areal_async.inference.supervision.deltas import HostCopies
from areal_async.inference.supervision.supervisor import ServerSupervisor
from areal_async.inference.supervision.swap import Staging
from areal_async.inference.supervision.updates import FleetContext
from areal_async.inference.supervision.verify import Verifier
from areal_async.protocol.run_state import LEFT
from areal_async.protocol.types import WeightsVersion

LEAVE_DEADLINE_S = 5.0
"""Time for the requests of a server that leaves to end there; those that do not are broken off."""
ABORT_INTERVAL_S = 0.5
NUM_CONNECTIONS = 256

log = structlog.get_logger()


class Fleet:
    """All servers of a node. ``resize`` at any time, while ``run`` runs or before."""

    def __init__(
        self,
        settings: Settings,
        *,
        node_id: str,
        log_directory: Path,
        publish: Callable[[ServerHandle], Awaitable[None]],
        frozen: str = "",
        version: str = NO_VERSION,
        first_gpu: int = 0,
    ) -> None:
        """Begin with ``inference.num_servers``. ``publish`` is called after each change of a server's state.

        Args:
            frozen: name of the policy whose servers keep the weights of ``model.path``; empty for the policy under
                training, whose servers take the announced ones.
            version: what the weights of ``model.path`` are, by which their servers stamp what they say.
            first_gpu: position of its first GPU among those of the node.
        """
        self._settings = settings
        self._node_id = node_id
        # What follows the last dash is no part of the node's id.
        self._prefix = f"{node_id}-{frozen}_" if frozen else f"{node_id}-"
        self._version = version
        self._first_gpu = first_gpu
        self._log_directory = log_directory
        self.pool = ServerPool([], deadline_s=settings.inference.start_bound_s)
        cache = settings.launch.weights_cache
        copies = None if cache is None or frozen else HostCopies(cache / settings.run.name / node_id)
        self._around = FleetContext(
            settings=settings.inference,
            pool=self.pool,
            verifier=Verifier(has_sha256=has_sha256(settings.inference)),
            publish=publish,
            frozen=WeightsVersion(version=version) if frozen else None,
            staging=Staging(copies),
        )
        self.target = self._around.target
        self.card = self._around.card
        self.wanted = frozenset(range(settings.inference.num_servers))
        """Indices of the servers that there are to be."""
        self._members: dict[int, anyio.CancelScope] = {}
        self._changed = anyio.Event()

    def resize(self, indices: Collection[int]) -> None:
        """Have the servers with these indices from now on."""
        if (wanted := frozenset(indices)) != self.wanted:
            log.info("fleet.resized", node_id=self._node_id, wanted=sorted(wanted), before=sorted(self.wanted))
        self.wanted = wanted
        self._changed.set()

    async def run(self) -> None:
        """Keep the servers that are wanted, until cancelled.

        consumes:     the indices wanted
        waits for:    a change of them, or a server that has left
        produces:     a supervised server for each of them
        unblocked by: cancellation; then the servers are stopped

        Raises:
            PipelineError: a server cannot start, or fails again and again.
        """
        with closing(self._around.staging):
            await self._run_members()

    async def _run_members(self) -> None:
        async with make_client(max_connections=NUM_CONNECTIONS) as administration, anyio.create_task_group() as tasks:
            while True:
                self._changed = anyio.Event()
                for index in sorted(self.wanted):
                    if index not in self._members:
                        self._members[index] = anyio.CancelScope()
                        tasks.start_soon(self._run_member, index, administration)
                for index, scope in self._members.items():
                    if index not in self.wanted:
                        scope.cancel()
                await self._changed.wait()

    async def _run_member(self, index: int, administration: httpx.AsyncClient) -> None:
        server_id = f"{self._prefix}{index}"
        server = self.pool.add(server_id, num_ranks=self._settings.inference.tensor_parallel)
        command = server_command(
            self._settings, server_id=server_id, index=index, first_gpu=self._first_gpu, version=self._version
        )
        process = ServerProcess(command, log_path=self._log_directory / f"server-{server_id}.log")
        api = ServerApi(administration, "")
        try:
            with self._members[index]:
                await ServerSupervisor(server, process, api, self._around).run()
            await self._dismiss(server, api)
        finally:
            await process.stop()
            was_shared, server.card = bool(server.card), ""
        if was_shared:
            await self._around.publish(server)
        log.info("server.left", server_id=server_id)
        del self._members[index]
        self._changed.set()

    async def _dismiss(self, server: ServerHandle, api: ServerApi) -> None:
        """Take leave of a server that is not wanted any more, and see its requests off."""
        await self._around.fence(server, LEFT)
        self.pool.remove(server, LEFT)
        with anyio.move_on_after(LEAVE_DEADLINE_S):
            while server.num_requests:  # more than once: one that was under way reaches the server after the order
                try:
                    await api.abort_all(deadline_s=LEAVE_DEADLINE_S)
                except ServerFault as exc:  # it was not up yet, or is gone
                    log.debug("server.abort_failed", server_id=server.id, cause=str(exc))
                with anyio.move_on_after(ABORT_INTERVAL_S):
                    await self.pool.wait_empty(server)
