"""Making a weights version the newest: gathered, broadcast where servers can take it so, on disk, announced.

    disk         gather -> [beside the next step: write -> announce]
    adapter      the same, of the adapters alone, which servers merge into the base they started with
    distributed  announce with the group -> gather and broadcast -> [beside the next steps, now and then: write]
                 a lineage's first version, step 1's and a checkpoint's: gather -> [beside the next step: write ->
                 announce with the group -> broadcast from the files]

Who may load what: a server that serves or waits for weights takes part in a broadcast; one that started later, or
missed it, takes the copy on disk, which is written for it; one that cannot read that gets a broadcast of its own.
Invariants: what is announced never goes back; the newest version is on disk or, dealt out, in the host memory of the
ranks (``version_writer``), for the server that comes next; whatever becomes of a broadcast, every rank takes part in
the whole gathering; none of several has the whole model in host memory.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import InferenceSettings
from areal_async.errors import PipelineError
from areal_async.inference.faults import StagingFault
from areal_async.inference.supervision.deltas import check_files
from areal_async.process.atomic_folders import keep_newest
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import DISK, DISTRIBUTED, UpdateGroup, Version, WeightsVersion
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.broadcast import Broadcaster
from areal_async.trainer.output.first_evaluation import FirstEvaluation
from areal_async.trainer.output.version_writer import VersionWriter

NUM_KEPT_WEIGHTS = 3
"""Newest weights folders kept: the one announced, and those a slow server may still be reading."""
SERVER_POLL_S = 0.1
MEMBER_POLL_S = 0.2
REPAIR_POLL_S = 2.0

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class WeightsPublisher:
    """One rank's part in publishing versions."""

    settings: InferenceSettings
    versions: VersionWriter
    thread: EngineThread
    """In which they are gathered."""
    writing: BackgroundJob
    """Writes what is announced once it is on disk; the next version waits for it."""
    copying: BackgroundJob
    """Writes copies of what was announced before; nobody waits for it."""
    holding: BackgroundJob
    """Waits, of a version that may not be announced yet, until it may."""
    first_evaluation: FirstEvaluation
    bus: Bus
    lineage: Lineage | None
    """Rank 0's alone."""
    broadcaster: Broadcaster | None
    """Rank 0's alone; None where weights travel by disk alone."""
    _newest: WeightsVersion | None = field(default=None, init=False)
    """As it is announced."""
    _on_disk: str = field(default="", init=False)
    _copyable: Version | None = field(default=None, init=False)
    """The newest version, where it is on no disk, nor to be."""
    _publishing: anyio.Lock = field(default_factory=anyio.Lock, init=False)
    _announcing: anyio.Lock = field(default_factory=anyio.Lock, init=False)

    def __post_init__(self) -> None:
        # Beside a step: behind what the engine has queued each bucket would wait for whole passes.
        self._sending_thread = EngineThread(self.thread.device, "weights", is_aside=True)

    async def publish(self, version: Version, *, is_kept: bool = False) -> None:
        """Make the weights as they are now the newest. Every rank calls it; none may train until it returns.

        Args:
            is_kept: have them on disk before they are announced, as of a lineage's first version.
        """
        await self.holding.finish()
        async with self._publishing:
            await self.writing.finish()
            is_first = self._newest is None
            is_held = not is_first and self.first_evaluation.holds(version)
            is_kept = is_kept or is_held or is_first
            group = None if is_kept else await self._open_group(await self._servers())
            await self._let_go()
            if group is None:
                self.versions.keep(version, await self.thread.run(self.versions.weights.gather))
                if self.lineage is not None and is_held:
                    self.holding.start_now(partial(self._announce_after_evaluation, version))
                elif self.lineage is not None:
                    await self.writing.start(self._write_and_announce)
            else:
                await self._publish_to(group, version)

    async def finish(self) -> None:
        """Wait until what is announced on disk is there, and every copy that has been begun."""
        await self.holding.finish()
        await self.writing.finish()
        await self.copying.finish()

    async def run_repairs(self) -> None:
        """See that every server can get the newest version; end this trainer where only another one could.

        consumes:     the servers' keys
        waits for:    one that is still behind at a second look, or cannot read the files of its weights
        produces:     a copy on disk, or where a server cannot read it, a broadcast of it
        unblocked by: cancellation alone

        Raises:
            PipelineError: files are not what was written. Those that are whole here are not visible there.
        """
        behind_before: set[tuple[str, str]] = set()
        whole = None
        while True:
            await anyio.sleep(REPAIR_POLL_S)
            newest, servers = self._newest, await self._servers()
            if newest is None or newest is not self._newest or self._publishing.locked() or not self.writing.is_idle:
                behind_before = set()  # some are given it right now
                continue
            # Files that were whole at one complaint may be damaged at the next.
            complaints = {key: state.unreadable for key, (state, _) in servers.items() if state.unreadable}
            seen = (newest.version, newest.path, complaints)
            if not complaints:
                whole = None
            elif newest.path and seen != whole:
                try:
                    await anyio.to_thread.run_sync(check_files, newest)
                    whole = seen
                except StagingFault as exc:
                    if newest is self._newest:
                        raise PipelineError(f"{exc}; a trainer that starts again writes them anew") from exc
            behind = {key: newest.version for key, (state, _) in servers.items() if _is_behind(state, newest)}
            late = {key for key, version in behind.items() if (key, version) in behind_before}
            behind_before = set(behind.items())
            if late and newest is self._newest and self.writing.is_idle and not self._publishing.locked():
                async with self._publishing:
                    await self._help({key: servers[key] for key in late}, newest)

    async def announce_final(self) -> None:
        """Say that the newest version is the run's last."""
        await self.holding.finish()
        async with self._publishing:  # what it is announced as now stays: it is broadcast to nobody again
            await self.finish()
            if self.lineage is None or self._newest is None:
                return
            if not self._newest.path:
                self._start_copy()
                await self.copying.finish()
            await self._announce(msgspec.structs.replace(_without_group(self._newest), final=True))

    async def close(self) -> None:
        """Finish, and end the writing of versions on every rank, which all call it. Nothing is repaired any more."""
        await self.holding.finish()
        async with self._publishing:
            await self.finish()
            self._newest = None
            await self.versions.close()
            self.versions.weights.close()

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

    async def _open_group(self, servers: dict[str, tuple[ServerState, int]]) -> UpdateGroup | None:
        """Return the group of those of the servers that can take part in a broadcast; None where there are none."""
        if self.broadcaster is None:
            return None
        return await anyio.to_thread.run_sync(self.broadcaster.open, servers.values())

    async def _publish_to(self, group: UpdateGroup, version: Version) -> None:
        """Announce a version to those who are to receive it, and broadcast it as it is gathered."""
        broadcaster = self.broadcaster
        assert broadcaster is not None
        await self._announce(
            WeightsVersion(version=str(version), kind=DISTRIBUTED, group=group, buckets=self.versions.weights.buckets)
        )
        gather = partial(self.versions.weights.gather, send=broadcaster.send)
        self.versions.keep(version, await self._broadcast(version, group, lambda: self.thread.run(gather)))
        self._copyable = version
        if not broadcaster.has_group or version.step % self.settings.disk_interval == 0:
            self._start_copy()

    async def _broadcast(self, version: Version, group: UpdateGroup, send: Callable[[], Awaitable[T]]) -> T:
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
                    sent = await send()
                    is_through = True
                    watch.cancel_scope.cancel()
        finally:
            if not is_through:
                broadcaster.give_up("the trainer ends")
        log.info(
            "weights.broadcast", version=str(version), group=group.name, is_whole=broadcaster.has_group,
            num_bytes=self.versions.weights.num_bytes, duration_s=round(time.monotonic() - started, 4),
        )  # fmt: skip
        return sent

    async def _broadcast_copy(self, written: WeightsVersion, group: UpdateGroup) -> None:
        """Broadcast what is on disk, beside the next step."""
        broadcaster = self.broadcaster
        assert broadcaster is not None
        send = partial(self.versions.weights.send, Path(written.path), broadcaster.send)
        await self._broadcast(Version.parse(written.version), group, lambda: self._sending_thread.run(send))

    async def _run_watch(self, broadcaster: Broadcaster) -> None:
        """Give the group up as soon as a member is known to be lost, rather than when its deadline is over."""
        while True:
            servers = {server_id: state for server_id, (state, _) in (await self._servers()).items()}
            lost = broadcaster.find_lost(servers)
            if lost:
                broadcaster.give_up(lost)
                return
            await anyio.sleep(MEMBER_POLL_S)

    async def _announce_after_evaluation(self, version: Version) -> None:
        """Publish what is kept of a version; until then servers can be given the one before it."""
        assert self._newest is not None
        await self.first_evaluation.over(of=self._newest.version, before=version)
        async with self._publishing:
            await self.writing.start(self._write_and_announce)

    async def _write_and_announce(self) -> None:
        """Make a version the newest once it is on disk; servers that can, receive it then."""
        await self.copying.finish()
        written = await self._write()
        group = await self._open_group(await self._servers())
        await self._announce(self._to_group(written, group))
        if group is not None:
            await self._broadcast_copy(written, group)

    async def _announce(self, weights: WeightsVersion, *, over: WeightsVersion | None = None) -> None:
        """Announce a version, or nothing where ``over`` is given and is not the newest any more."""
        async with self._announcing:
            if over is not None and over is not self._newest:
                return
            assert self.lineage is not None
            self._newest = msgspec.structs.replace(weights, on_disk=self._on_disk)
            await self.lineage.announce(self._newest)

    def _to_group(self, written: WeightsVersion, group: UpdateGroup | None) -> WeightsVersion:
        if group is None:
            return written
        return msgspec.structs.replace(written, kind=DISTRIBUTED, group=group, buckets=self.versions.weights.buckets)

    # copies on disk of what was broadcast

    def _start_copy(self) -> None:
        """Write the newest version beside the next steps, unless an older one is being written: then it is due again
        at the next look."""
        if self._copyable is not None and self._newest is not None and self.copying.is_idle:
            self._copyable = None
            self.copying.start_now(partial(self._copy, self._newest))

    async def _let_go(self) -> None:
        """Forget the newest version, which is about to be superseded, where it is not written."""
        if self._copyable is not None:
            self._copyable = None
            await self.versions.let_go()

    async def _copy(self, announced: WeightsVersion) -> None:
        await self._announce(await self._write(), over=announced)

    async def _write(self) -> WeightsVersion:
        """Write the copy that any server can load that sees the files, now or later."""
        written = await self.versions.write()
        self._on_disk = written.version
        assert self.lineage is not None
        keep = partial(keep_newest, self.versions.directory, NUM_KEPT_WEIGHTS, lineage=self.lineage.number)
        await anyio.to_thread.run_sync(keep)
        return written

    async def _help(self, late: dict[str, tuple[ServerState, int]], newest: WeightsVersion) -> None:
        """Give the newest version to servers that have missed it: on disk, and by a broadcast where it is there."""
        if not newest.path:
            self._start_copy()
            return
        group = await self._open_group({key: one for key, one in late.items() if one[0].unreadable})
        if group is not None:
            await self.writing.start(partial(self._send_again, newest, group))

    async def _send_again(self, newest: WeightsVersion, group: UpdateGroup) -> None:
        await self._announce(self._to_group(newest, group))
        await self._broadcast_copy(newest, group)


def _is_behind(state: ServerState, newest: WeightsVersion) -> bool:
    return state.wants_weights or (not state.fenced and state.version != newest.version)


def _without_group(weights: WeightsVersion) -> WeightsVersion:
    kind = DISK if weights.kind == DISTRIBUTED else weights.kind
    return msgspec.structs.replace(weights, kind=kind, group=None, buckets=[])


def _laggards(servers: dict[str, tuple[ServerState, int]], version: Version) -> str:
    states = [state for state, _ in servers.values() if state.fenced or state.version != str(version)]
    said = [f"{one.server_id} ({one.reason or f'holds {one.version}'})" for one in states]
    return ", ".join(sorted(said)) or "there is none"
