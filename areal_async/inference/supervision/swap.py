"""Give one server another weights version while it generates.

    staged (hashes checked) or joined -> pause -> update -> the server names the new version -> continue

Invariant: a server is continued only after the whole of its update; one whose update failed stays paused, since it may
run half of each version and must not generate another token until it is restored. Only the swap pauses anything: the
files are read and checked, and the group is met, before it begins.
"""

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.inference.faults import RefusalFault, ServerFault
from areal_async.inference.http import ServerApi
from areal_async.inference.supervision.deltas import HostCopies, check_files
from areal_async.process.failpoints import failpoint
from areal_async.protocol.types import DISK, WeightsVersion

ORDER_DEADLINE_S = 60.0
"""Deadline of pausing, continuing and the like, which wait for one step of the server at most."""
ABANDON_DEADLINE_S = 20.0
"""Time for a server that waits in a broadcast to notice that the trainer has closed the group."""

log = structlog.get_logger()

Check = Callable[[ServerApi, WeightsVersion], Awaitable[None]]


class SwapTimes(NamedTuple):
    """Where the time of one swap went, in seconds."""

    pause_s: float
    transfer_s: float
    resume_s: float


class Staging:
    """Has each announced version's files checked once, however many servers are about to load them; where hosts keep
    copies, there."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self._lock = anyio.Lock()
        self._copies = copies
        self._staged: tuple[str, str] = ("", "")
        """Version, and where servers load it from."""

    async def stage(self, target: WeightsVersion) -> tuple[WeightsVersion, float]:
        """Check the files against their hashes in a thread; return what servers load, and the seconds it took.

        Raises:
            StagingFault: a file is missing or differs.
        """
        started = time.monotonic()
        async with self._lock:
            if self._staged[0] != target.version:
                self._staged = target.version, await anyio.to_thread.run_sync(self._stage, target)
        return msgspec.structs.replace(target, path=self._staged[1]), time.monotonic() - started

    def forget(self) -> None:
        """Have the files read again before they are loaded again: a server could not load them."""
        self._staged = "", ""

    def close(self) -> None:
        """Leave no copies behind."""
        if self._copies is not None:
            self._copies.close()

    def _stage(self, target: WeightsVersion) -> str:
        if self._copies is not None and target.kind == DISK:
            try:
                return self._copies.stage(target).path
            except OSError as exc:  # no room here, or nothing to read there, which is said next
                log.warning("weights.not_copied", version=target.version, cause=str(exc))
        check_files(target)
        return target.path


async def check_version(api: ServerApi, target: WeightsVersion) -> None:
    """Believe only what the server says itself.

    Raises:
        ServerFault: it names another version.
    """
    version = await api.weight_version(deadline_s=ORDER_DEADLINE_S)
    if version != target.version:
        raise ServerFault(f"after the update: got version {version!r}, need {target.version}")


async def swap(
    api: ServerApi, target: WeightsVersion, *, mode: str, deadline_s: float, check: Check = check_version
) -> SwapTimes:
    """Load ``target``, whose files are checked, into one server.

    Args:
        check: raises ServerFault unless the server runs ``target`` then; a server whose weights nobody can be sure of
            (it has just started, an update broke) needs more than its word.

    Raises:
        ServerFault: it did not pause, load, name the new version or continue; unless it could not even continue, it
            is still paused.
    """
    path = _absolute(target.path)
    load = partial(
        api.load_weights, path=path, version=target.version, flush_cache=_may_flush(mode), deadline_s=deadline_s
    )
    return await _update(api, target, load, check, mode=mode)


async def swap_by_broadcast(
    api: ServerApi, target: WeightsVersion, *, mode: str, deadline_s: float, check: Check = check_version
) -> SwapTimes:
    """Have one server, which has joined ``target.group``, receive ``target`` while its trainer broadcasts it.

    Raises:
        ServerFault: as ``swap``. It may then run some of the new weights and some of the old, still paused.
    """

    async def receive() -> None:
        with anyio.move_on_after(deadline_s):
            # The whole has the deadline; one that a request had as well could be over a moment before it.
            await _receive(api, target, mode=mode, deadline_s=2 * deadline_s)
            return
        raise ServerFault(
            f"broadcast of {target.version}: not over within inference.transfer_deadline_s = {deadline_s:g} s"
        )

    return await _update(api, target, receive, check, mode=mode)


async def abandon(api: ServerApi, group: str) -> None:
    """Have a paused server forget a broadcast that broke, its requests included, which then go on elsewhere.

    Raises:
        ServerFault: it does not answer: it may still wait for a rank that is gone, and has to be restarted.
    """
    orders = [api.abort_all]
    if group:
        orders += [api.end_update, lambda *, deadline_s: api.leave_group(group, deadline_s=deadline_s)]
    for order in orders:
        with suppress(RefusalFault):  # there was no session any more, or no group
            await order(deadline_s=ABANDON_DEADLINE_S)


async def _update(
    api: ServerApi, target: WeightsVersion, transfer: Callable[[], Awaitable[None]], check: Check, *, mode: str
) -> SwapTimes:
    start = time.monotonic()
    await api.pause(mode, deadline_s=ORDER_DEADLINE_S)
    paused = time.monotonic()
    failpoint("node.paused")
    await transfer()
    await check(api, target)
    updated = time.monotonic()
    failpoint("node.updated")
    await api.resume(deadline_s=ORDER_DEADLINE_S)
    return SwapTimes(pause_s=paused - start, transfer_s=updated - paused, resume_s=time.monotonic() - updated)


async def _receive(api: ServerApi, target: WeightsVersion, *, mode: str, deadline_s: float) -> None:
    assert target.group is not None
    await api.begin_update(deadline_s=ORDER_DEADLINE_S)
    for bucket in target.buckets:
        is_last = bucket is target.buckets[-1]
        await api.receive_bucket(
            bucket,
            group=target.group.name,
            version=target.version if is_last else None,
            flush_cache=is_last and _may_flush(mode),
            deadline_s=deadline_s,
        )
    await api.end_update(deadline_s=ORDER_DEADLINE_S)


def _absolute(path: str) -> str:
    """The server may have another working directory."""
    return os.path.abspath(path)


def _may_flush(mode: str) -> bool:
    """Requests held in place keep their cache, which then cannot be flushed."""
    return mode != "in_place"
