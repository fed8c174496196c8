"""Whether somebody runs a run of which no process answers: one that begins, or whose processes are all dead.

Here its directory says so; of one elsewhere its launcher's key, which is written anew as long as the launcher lives.
"""

import math
import time
from collections.abc import Awaitable, Callable

from areal_async.bus import Bus
from areal_async.launch.heartbeat_lock import BEAT_S, NUM_MISSED, next_word
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.run_state import Holder
from areal_async.protocol.subjects import LAUNCHER

AskLive = Callable[[], Awaitable[bool]]
"""Says whether a launcher lives."""


def locked(directory: RunDirectory) -> AskLive:
    """Ask the directory of a run on this host's disks."""

    async def ask() -> bool:
        return directory.is_live

    return ask


def awaiting_beat(bus: Bus) -> AskLive:
    """Ask by waiting for the launcher's next word; that takes a beat of one that lives, and two where none does."""

    async def ask() -> bool:
        return await next_word(bus, LAUNCHER, within_s=2 * BEAT_S) is not None

    return ask


class BeatsSeen:
    """Tells anyone who asks again and again whether the launcher has spoken lately, by what stood there before."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._revision: int | None = None
        self._heard_s = -math.inf

    async def is_live(self) -> bool:
        """Look once, without waiting; True from the second beat on."""
        _, revision = await self._bus.get(LAUNCHER, Holder)
        now_s = time.monotonic()
        if self._revision is not None and revision != self._revision:
            self._heard_s = now_s
        self._revision = revision
        return now_s - self._heard_s < NUM_MISSED * BEAT_S
