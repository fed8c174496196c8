"""Keeps one running server on the newest announced weights, by broadcast or from disk, and repairs it in place.

Level-triggered: each turn looks at what is announced and what the server holds, and closes the gap, so a lost event, a
restart and a late joiner are one case. Invariants: the node's state says that a server holds a version after it does,
never before; a server whose update failed is fenced at once; a server that has started or was fenced returns with the
newest version and no older one, from disk, verified, or from a broadcast of it all. A server whose weights stay as they
are is admitted when it says that it runs what it was started with.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from uuid import uuid4

import anyio
import structlog

from areal_async.config.settings import InferenceSettings
from areal_async.errors import UserError
from areal_async.inference.card import SharedCard
from areal_async.inference.commands import choose_backend
from areal_async.inference.faults import RefusalFault, ServerFault, StagingFault
from areal_async.inference.http import TRANSPORT_ERRORS, ServerApi
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.servers import HEALTH_DEADLINE_S
from areal_async.inference.supervision.swap import (
    ORDER_DEADLINE_S,
    Staging,
    SwapTimes,
    abandon,
    check_version,
    swap,
    swap_by_broadcast,
)
from areal_async.inference.supervision.verify import Verifier
from areal_async.process.bell import Bell
from areal_async.protocol.types import ADAPTER, UpdateGroup, Version, WeightsVersion
from areal_async.telemetry import spans, wait_graph

STAGING_RETRY_S = 2.0
GRAMMAR_RETRY_S = 0.5
REACH_DEADLINE_S = 5.0
"""Deadline for finding the trainer's store where a broadcast says it is."""

log = structlog.get_logger()


class Target:
    """The newest announced weights, for all servers of a node."""

    def __init__(self) -> None:
        self.newest: WeightsVersion | None = None
        self.changed = Bell()

    def announce(self, version: WeightsVersion) -> None:
        """Have every server change to ``version``."""
        self.newest = version
        self.changed.ring()


@dataclass(frozen=True, kw_only=True)
class FleetContext:
    """What the servers of one node have in common."""

    settings: InferenceSettings
    pool: ServerPool
    verifier: Verifier
    publish: Callable[[ServerHandle], Awaitable[None]]
    """Called with each change of a server's state, after it."""
    target: Target = field(default_factory=Target)
    frozen: WeightsVersion | None = None
    """The servers keep the weights that they start with, and call them so; nothing is announced to them."""
    staging: Staging = field(default_factory=Staging)

    @cached_property
    def card(self) -> SharedCard:
        """Whose turn it is on the GPUs; who waits for a new target hears of it too."""
        return SharedCard(self.target.changed, self.pool.clock)

    async def fence(self, server: ServerHandle, reason: str) -> None:
        """Send nothing more to a server, and say so."""
        self.pool.fence(server, reason)
        await self.publish(server)


class Updater:
    """The updates of one server process, from its start to its end."""

    def __init__(self, server: ServerHandle, api: ServerApi, around: FleetContext) -> None:
        self._server = server
        self._api = api
        self._around = around
        self._group = ""
        self._adapter = ""
        """Version of the first adapter that was announced to a server which takes none."""
        self.is_updating = False
        """It is paused, or about to be, and cannot be expected to be healthy."""

    async def run(self) -> str:
        """Follow the announcements until the server has to be restarted; return why.

        consumes:     announced weights versions, and the trainer's turns on the GPUs
        waits for:    the next one that it can take
        produces:     a server that holds the newest, and is out of the way in those turns
        unblocked by: an announcement

        Raises:
            UserError: adapters are announced, and the servers take none.
        """
        if self._around.frozen is not None:
            return await self._run_frozen(self._around.frozen)
        while True:
            if self._around.card.hold:
                try:
                    await self._give_way()
                except ServerFault as exc:
                    return f"sharing a GPU: {exc}"
                continue
            num_seen = self._around.target.changed.num_rings
            order = self._next()
            await self._tell_waiting(order)
            if order is None:
                await self._around.target.changed.wait(num_seen)
                continue
            if order.kind == ADAPTER and choose_backend(self._around.settings) == "sglang":
                await self._wait_for_whole(order, num_seen)
                continue
            try:
                with (
                    wait_graph.on(
                        wait_graph.server(self._server.id), "an update of", waiter=wait_graph.weights(order.version)
                    ),
                    spans.part_of_step(Version.parse(order.version), "swap", server_id=self._server.id),
                ):
                    try:
                        await self._carry_out(order)
                    except StagingFault as exc:
                        await self._wait_for_files(order, str(exc), num_seen)
            except ServerFault as exc:
                return f"weights {order.version}: {exc}"

    async def _give_way(self) -> None:
        """Have the server give its cache's memory to the trainer, and take it again when that is done.

        It goes on with what it had under way, unless nobody can be sure of its weights: then it stays paused.

        Raises:
            ServerFault: it does not answer, or has not the memory that it gave back.
        """
        self.is_updating = True
        await self._pause_idle()
        await self._api.release_memory(deadline_s=ORDER_DEADLINE_S)
        await self._around.card.stay_away(self._server, self._around.publish)
        await self._api.resume_memory(deadline_s=ORDER_DEADLINE_S)
        if self._server.version:
            await self._api.resume(deadline_s=ORDER_DEADLINE_S)
        self.is_updating = False

    async def _pause_idle(self) -> None:
        """Pause so that it may be told to release its memory: it ends if told so while a request waits for its grammar.

        It looks for grammars that are compiled while it generates alone, so it goes on for a moment where one is.
        """
        ends_at_s = anyio.current_time() + ORDER_DEADLINE_S
        await self._api.pause("retract", deadline_s=ORDER_DEADLINE_S)
        while self._server.version and not await self._api.flush_cache(deadline_s=ORDER_DEADLINE_S):
            if anyio.current_time() > ends_at_s:
                raise ServerFault(f"requests wait for their grammars for longer than {ORDER_DEADLINE_S:g} s")
            await self._api.resume(deadline_s=ORDER_DEADLINE_S)
            await anyio.sleep(GRAMMAR_RETRY_S)
            await self._api.pause("retract", deadline_s=ORDER_DEADLINE_S)

    async def _run_frozen(self, started_with: WeightsVersion) -> str:
        """Admit a server that says it runs what it was started with, and leave it alone; return why it does not."""
        try:
            await check_version(self._api, started_with)
        except ServerFault as exc:
            return f"frozen weights: {exc}"
        self._around.pool.admit(self._server, url=self._api.url, version=started_with.version)
        await self._around.publish(self._server)
        while True:
            await anyio.sleep_forever()

    async def _tell_waiting(self, order: WeightsVersion | None) -> None:
        """Say whether this server, which serves nothing, waits for weights: the trainer then sees that it gets some."""
        server = self._server
        loads_files = order is not None and not self._can_receive(order) and not server.unreadable
        wants_weights = not server.version and not loads_files
        if wants_weights != server.wants_weights:
            server.wants_weights = wants_weights
            await self._around.publish(server)

    async def _wait_for_files(self, order: WeightsVersion, cause: str, num_seen: int) -> None:
        """Say that they cannot be loaded, for the trainer to write them anew or to broadcast them; then look again.

        They may also be replaced by newer ones meanwhile, or not be visible on this host yet.

        Args:
            num_seen: announcements before this version was chosen; another one ends the wait.
        """
        log.warning("weights.unreadable", server_id=self._server.id, cause=cause)
        if cause != self._server.unreadable:
            self._server.unreadable = cause
            self._server.wants_weights = not self._server.version
            await self._around.publish(self._server)
        with wait_graph.on(
            wait_graph.files(order.version), f"readable ones ({cause}) among", waiter=wait_graph.server(self._server.id)
        ):
            with anyio.move_on_after(STAGING_RETRY_S):
                await self._around.target.changed.wait(num_seen)

    async def _wait_for_whole(self, order: WeightsVersion, num_seen: int) -> None:
        """Leave an adapter alone: it may be what a trainer with other servers has left, and the next is whole.

        Args:
            num_seen: announcements before this version was chosen; another one ends the wait.

        Raises:
            UserError: this is the next one.
        """
        if self._adapter not in ("", order.version):
            raise UserError(
                f"weights {order.version}: got an adapter, and this node's servers are SGLang's, which take whole "
                "weights; set trainer.lora.transfer to merged"
            )
        self._adapter = order.version
        with wait_graph.on(
            wait_graph.weights(order.version), "whole ones after", waiter=wait_graph.server(self._server.id)
        ):
            await self._around.target.changed.wait(num_seen)

    def _next(self) -> WeightsVersion | None:
        """Choose the version to change to now; None while there is none that this server could take."""
        newest = self._around.target.newest
        if newest is None or newest.version == self._server.version:
            return None
        return newest if newest.path or self._can_receive(newest) else None

    def _can_receive(self, newest: WeightsVersion) -> bool:
        """Say whether this is a broadcast that waits for this very process; others take the copy on disk."""
        group = newest.group
        return group is not None and group.incarnations.get(self._server.id) == self._server.incarnation

    async def _carry_out(self, order: WeightsVersion) -> None:
        """Change to a version, and admit.

        Raises:
            StagingFault: its files cannot be had; nothing was changed.
            ServerFault: the server cannot be repaired in place.
        """
        group = order.group if self._can_receive(order) else None
        order, stage_s = await self._around.staging.stage(order) if group is None else (order, 0.0)
        join_s = await self._join_in_time(order, group) if group is not None else 0.0
        if join_s is None:
            return
        swapped = await self._attempt(order, by_broadcast=group is not None)
        if swapped is None:
            return
        self._around.pool.admit(self._server, url=self._api.url, version=order.version)
        self._server.num_swaps += 1
        self._server.swap_total_s += sum(swapped)
        log.info(
            "server.swapped", server_id=self._server.id, version=order.version, kind=order.kind,
            stage_s=round(stage_s, 4), join_s=round(join_s, 4), pause_s=round(swapped.pause_s, 4),
            transfer_s=round(swapped.transfer_s, 4), resume_s=round(swapped.resume_s, 4),
        )  # fmt: skip
        await self._around.publish(self._server)

    async def _unless_replaced(self, order: WeightsVersion, receive: Callable[[], Awaitable[SwapTimes]]) -> SwapTimes:
        """Take part in a broadcast, for as long as its sender has not been replaced.

        Raises:
            ServerFault: it has been; or as ``receive``.
        """
        target, times, fault = self._around.target, None, None

        def is_replaced() -> bool:
            return target.newest is not None and _lineage(target.newest) > _lineage(order)

        async def watch() -> None:
            num_seen = target.changed.num_rings
            while not is_replaced():
                await target.changed.wait(num_seen)
                num_seen = target.changed.num_rings
            receiving.cancel()

        receiving = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                with receiving:
                    times = await receive()
            except ServerFault as exc:
                fault = exc
            tasks.cancel_scope.cancel()
        if fault is not None:
            raise fault
        if is_replaced() or times is None:
            raise ServerFault("another trainer has taken over from the one that sends it")
        return times

    async def _join_in_time(self, order: WeightsVersion, group: UpdateGroup) -> float | None:
        """Meet the group of a broadcast; None when it was missed, which a server that is well survives.

        It says so, for the others to wait for it no longer, and the trainer to give it the version otherwise.
        """
        try:
            return await self._join(group)
        except ServerFault as exc:
            log.warning("broadcast.missed", server_id=self._server.id, version=order.version, cause=str(exc))
            if not await self._api.is_healthy(deadline_s=HEALTH_DEADLINE_S):
                raise
            self._server.missed = f"{group.name}: {exc}"
            self._give_up_place()
            await self._around.publish(self._server)
            return None

    async def _join(self, group: UpdateGroup) -> float:
        """Be a member of ``group`` and of no other; return the seconds it took to meet the others.

        Raises:
            ServerFault: the trainer is not there (any more), or not all ranks came.
        """
        started = time.monotonic()
        if self._group == group.name:
            return 0.0
        await self._leave()
        try:  # a server that looks for a store that is gone is of no use for as long as it looks
            with anyio.fail_after(REACH_DEADLINE_S):
                await (await anyio.connect_tcp(group.address, group.port)).aclose()
        except (OSError, TimeoutError) as exc:
            raise ServerFault(f"nobody at {group.address}:{group.port}: {exc}") from exc
        self._group = group.name
        await self._api.join_group(
            group, rank=group.ranks[self._server.id], deadline_s=self._around.settings.transfer_deadline_s
        )
        return time.monotonic() - started

    def _give_up_place(self) -> None:
        """Have no place in a group any more: to a trainer that broadcasts, this is another server from now on."""
        self._server.incarnation = uuid4().hex

    async def _leave(self) -> None:
        group, self._group = self._group, ""
        if group:
            try:
                await self._api.leave_group(group, deadline_s=HEALTH_DEADLINE_S)
            except RefusalFault as exc:
                log.debug("group.not_left", server_id=self._server.id, group=group, cause=str(exc))

    async def _attempt(self, order: WeightsVersion, *, by_broadcast: bool) -> SwapTimes | None:
        """Update the server; None when that failed, and the server is well: it is fenced, paused and to be restored.

        Raises:
            ServerFault: it does not answer (any more), or could not be restored from files.
        """
        settings, mode = self._around.settings, self._around.settings.interrupt
        is_serving = bool(self._server.version)
        self.is_updating = True
        if is_serving and mode == "in_place":
            self._around.pool.hold(self._server)
        try:
            check = check_version if is_serving else self._around.verifier.check
            if by_broadcast:
                deadline_s = settings.transfer_deadline_s
                receive = partial(swap_by_broadcast, self._api, order, mode=mode, deadline_s=deadline_s, check=check)
                times = await self._unless_replaced(order, receive)
            else:
                times = await swap(self._api, order, mode=mode, deadline_s=settings.start_deadline_s, check=check)
        except ServerFault as exc:
            self._around.staging.forget()
            if not is_serving and not by_broadcast:
                raise
            log.warning("update.failed", server_id=self._server.id, version=order.version, cause=str(exc))
            self._give_up_place()
            await self._around.fence(self._server, f"update to {order.version} failed: {exc}")
            if not by_broadcast and isinstance(exc.__cause__, TRANSPORT_ERRORS):
                raise  # it had all the time that a load may take, and would be asked for the same once more
            group, self._group = self._group, ""
            try:
                await abandon(self._api, group)
            except ServerFault as still:
                raise ServerFault(f"{exc}; cannot be repaired in place: {still}") from still
            return None
        self.is_updating = False
        return times


def _lineage(weights: WeightsVersion) -> int:
    """Return who says it: any older one has been replaced."""
    return weights.taken_by or Version.parse(weights.version).lineage
