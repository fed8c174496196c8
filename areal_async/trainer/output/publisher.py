"""Making a weights version the newest: gathered, broadcast where servers can take it so, on disk, announced.

    disk         gather -> [beside the next step: write -> announce]
    adapter      the same, of the adapters alone, which servers merge into the base they started with
    distributed  announce with the group -> gather and broadcast -> [beside the next step: write -> announce]

Invariants: a version is announced only after the one before it is on disk, so there is always a whole copy for a
server that starts or missed a broadcast, and what is announced never goes back; whatever becomes of a broadcast, every
rank takes part in the whole gathering.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog
from torch import Tensor

from areal_async.bus import Bus
from areal_async.config.settings import InferenceSettings
from areal_async.errors import PipelineError
from areal_async.inference.faults import StagingFault
from areal_async.inference.swap import check_files
from areal_async.process.atomic_folders import keep_newest
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import DISTRIBUTED, UpdateGroup, Version, WeightsVersion
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.broadcast import Broadcaster
from areal_async.trainer.output.served import ServedWeights

NUM_KEPT_WEIGHTS = 3
"""Newest weights folders kept: the one announced, and those a slow server may still be reading."""
SERVER_POLL_S = 0.1
MEMBER_POLL_S = 0.2
REPAIR_POLL_S = 2.0

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class WeightsPublisher:
    """One rank's part in publishing versions."""

    settings: InferenceSettings
    directory: Path
    """Where versions are written."""
    weights: ServedWeights
    thread: EngineThread
    """In which they are gathered."""
    writing: BackgroundJob
    """Writes them."""
    bus: Bus
    lineage: Lineage | None
    """Rank 0's alone."""
    broadcaster: Broadcaster | None
    """Rank 0's alone; None where weights travel by disk alone."""
    _newest: WeightsVersion | None = field(default=None, init=False)

    async def publish(self, version: Version) -> None:
        """Make the weights as they are now the newest. Every rank calls it; none may train until it returns."""
        await self.finish()
        group = await self._open_group(version)
        if group is not None:
            tensors = await self._broadcast(version, group)
        else:
            tensors = await self.thread.run(self.weights.gather)
        lineage = self.lineage
        if lineage is not None:
            await self.writing.start(lambda: self._keep(version, tensors, lineage))

    async def finish(self) -> None:
        """Wait until the newest version is on disk, and announced so."""
        await self.writing.finish()

    async def run_repairs(self) -> None:
        """End this trainer where servers cannot load the newest version since its files are not what was written.

        consumes:     the servers' keys
        waits for:    one that says it cannot read the files of its weights
        produces:     nothing; started again, the trainer writes weights anew
        unblocked by: cancellation alone

        Raises:
            PipelineError: so it is. Files that are whole here are not visible there, which no trainer can mend.
        """
        whole = None
        while True:
            await anyio.sleep(REPAIR_POLL_S)
            newest, servers = self._newest, await self._servers()
            if newest is None or newest is whole or not any(state.unreadable for state, _ in servers.values()):
                continue
            try:
                await anyio.to_thread.run_sync(check_files, newest)
                whole = newest
            except StagingFault as exc:
                if newest is self._newest:
                    raise PipelineError(f"{exc}; a trainer that starts again writes them anew") from exc

    async def announce_final(self) -> None:
        """Say that the newest version is the run's last."""
        await self.finish()
        if self.lineage is not None and self._newest is not None:
            await self.lineage.announce(msgspec.structs.replace(self._newest, final=True))

    async def wait_until_held(self, version: Version, *, should_stop: Callable[[], bool]) -> None:
        """Wait until every unfenced server holds ``version``: nothing older is sampled from now on.

        Raises:
            PipelineError: they had time enough to start and to load it.
        """
        if self.lineage is None:
            return
        # A server may need all of the one to start, and then the other to load.
        deadline_s = self.settings.start_bound_s + self.settings.start_deadline_s
        ends_at = anyio.current_time() + deadline_s
        while not should_stop():
            servers = await self._servers()
            held = [state.version for state, _ in servers.values() if not state.fenced]
            if held and all(one == str(version) for one in held):
                return
            if anyio.current_time() > ends_at:
                raise PipelineError(
                    f"weights {version}: not held by every server within {deadline_s:g} s: "
                    f"{_laggards(servers, version)}; see their logs, or raise inference.start_deadline_s"
                )
            await anyio.sleep(SERVER_POLL_S)

    async def _servers(self) -> dict[str, tuple[ServerState, int]]:
        entries = await self.bus.entries("server.", ServerState)
        return {state.server_id: (state, revision) for state, revision in entries.values()}

    async def _open_group(self, version: Version) -> UpdateGroup | None:
        """Have the servers join, where there are any: they do when they read of it."""
        if self.broadcaster is None or self.lineage is None:
            return None
        servers = await self._servers()
        group = await anyio.to_thread.run_sync(self.broadcaster.open, servers.values())
        if group is not None:
            await self.lineage.announce(
                WeightsVersion(version=str(version), kind=DISTRIBUTED, group=group, buckets=self.weights.buckets)
            )
        return group

    async def _broadcast(self, version: Version, group: UpdateGroup) -> dict[str, Tensor]:
        broadcaster = self.broadcaster
        assert broadcaster is not None
        started = time.monotonic()
        is_through = False
        try:
            with wait_graph.PollingWaits() as receivers:
                async with anyio.create_task_group() as watch:
                    receivers.replace(
                        wait_graph.publication(str(version)), map(wait_graph.server, group.ranks), "the broadcast to"
                    )
                    watch.start_soon(self._run_watch, broadcaster)
                    tensors = await self.thread.run(lambda: self.weights.gather(send=broadcaster.send))
                    is_through = True
                    watch.cancel_scope.cancel()
        finally:
            if not is_through:
                broadcaster.give_up("the trainer ends")
        log.info(
            "weights.broadcast", version=str(version), group=group.name, is_whole=broadcaster.has_group,
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            duration_s=round(time.monotonic() - started, 4),
        )  # fmt: skip
        return tensors

    async def _run_watch(self, broadcaster: Broadcaster) -> None:
        """Give the group up as soon as a member is known to be lost, rather than when its deadline is over."""
        while True:
            servers = {server_id: state for server_id, (state, _) in (await self._servers()).items()}
            lost = broadcaster.find_lost(servers)
            if lost:
                broadcaster.give_up(lost)
                return
            await anyio.sleep(MEMBER_POLL_S)

    async def _keep(self, version: Version, tensors: dict[str, Tensor], lineage: Lineage) -> None:
        """Write the copy that any server can load, now or later, and say where it is."""
        self._newest = await anyio.to_thread.run_sync(self.weights.write, tensors, version, self.directory)
        await lineage.announce(self._newest)
        await anyio.to_thread.run_sync(keep_newest, self.directory, NUM_KEPT_WEIGHTS)


def _laggards(servers: dict[str, tuple[ServerState, int]], version: Version) -> str:
    states = [state for state, _ in servers.values() if state.fenced or state.version != str(version)]
    said = [f"{one.server_id} ({one.reason or f'holds {one.version}'})" for one in states]
    return ", ".join(sorted(said)) or "there is none"
