"""Who is there: what becomes of each group, under its key for ``status`` and as events for the run's history.

The launcher knows why a process that it started has died, and hears when its successor works. A node that joined
from elsewhere it knows by hearing alone: silence is all there is to tell of its end.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream

from areal_async.bus import Bus
from areal_async.bus.server import BROKER
from areal_async.controller.processes.reports import AwakeClock
from areal_async.errors import WireError
from areal_async.protocol.events import Event, RoleLeft, RoleLost, RoleReturned, RoleStarted, now
from areal_async.protocol.run_state import CrewState
from areal_async.protocol.subjects import TOKEN
from areal_async.protocol.wire import decode_json
from areal_async.telemetry import wait_graph

TICK_S = 0.25
SILENT_S = 2.5
"""Everybody speaks every second."""
DEAF_S = 1.5
"""When nobody has been heard for this long it is the broker that is away, and nobody else's silence says anything."""
MAX_GROUP_CHARACTERS = 256
"""A process that speaks for nodes may call one as it likes."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """A process group as it was seen last."""

    state: str
    num_starts: int
    lost_s: float | None = None
    """Time of its loss in seconds, by the launcher's clock; None while it is there."""
    heard_s: float | None = None
    """Time at which it was heard last, in seconds, where hearing is all that is known of it; else None."""


class Membership:
    """What is known of every process group. Pure: it takes in what happens and when, and returns what is to be told."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._heard_s = -math.inf

    def on_change(self, change: CrewState, *, now_s: float) -> Iterator[Event]:
        """Take in what the launcher itself has done or seen."""
        known = self._known.setdefault(change.name, _Known(change.state, change.num_starts))
        known.state, known.num_starts, known.heard_s = change.state, change.num_starts, None
        match change.state:
            case "running" if change.num_starts == 1:
                yield RoleStarted(crew=change.name, at=change.at)
            case "died":
                known.lost_s = now_s
                yield RoleLost(crew=change.name, reason=change.reason, num_starts=change.num_starts, at=change.at)
            case "finished" | "stopped":
                yield RoleLeft(crew=change.name, at=change.at)

    def on_report(self, group: str, *, now_s: float) -> Iterator[Event | CrewState]:
        """Take in that a process of a group has spoken."""
        self._heard_s = now_s
        known = self._known.get(group)
        if known is None:
            self._known[group] = _Known("running", 1, heard_s=now_s)
            yield CrewState(name=group, state="running", num_starts=1, at=now())
            yield RoleStarted(crew=group)
            return
        if known.heard_s is not None:
            known.heard_s = now_s
            if known.state != "running":
                known.state, known.num_starts = "running", known.num_starts + 1
                yield CrewState(name=group, state="running", num_starts=known.num_starts, at=now())
        if known.state == "running" and known.lost_s is not None:
            away_s = round(now_s - known.lost_s, 1)
            known.lost_s = None
            yield RoleReturned(crew=group, num_starts=known.num_starts, away_s=away_s)

    def on_farewell(self, group: str) -> Iterator[Event | CrewState]:
        """Take in that a process has said farewell; of one that the launcher keeps it knows better itself."""
        known = self._known.get(group)
        if known is not None and known.heard_s is not None and known.state == "running":
            known.state = "stopped"
            yield CrewState(name=group, state="stopped", num_starts=known.num_starts, at=now())
            yield RoleLeft(crew=group)

    def check(self, *, now_s: float) -> Iterator[Event | CrewState]:
        """Look who is not heard any more."""
        if now_s - self._heard_s > DEAF_S:
            return
        for group, known in self._known.items():
            if known.heard_s is not None and known.state == "running" and now_s - known.heard_s > SILENT_S:
                known.state, known.lost_s = "died", now_s
                reason = f"not heard for {now_s - known.heard_s:.1f} s"
                yield CrewState(name=group, state="died", num_starts=known.num_starts, reason=reason, at=now())
                yield RoleLost(crew=group, reason=reason, num_starts=known.num_starts)


class MembershipPublisher:
    """Publishes what ``Membership`` finds: a key for ``status``, and events for the run's history."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._membership = Membership()
        self._reasons: dict[str, str] = {}
        self._clock_s = time.monotonic()

    async def run_changes(self, changes: MemoryObjectReceiveStream[CrewState]) -> None:
        """Tell what becomes of the groups that the launcher keeps.

        consumes:     changes
        waits for:    the next one
        produces:     keys that ``status`` reads, and events
        unblocked by: the end of the changes
        """
        with changes:
            async for change in changes:
                await self._publish(change)
                await self._publish_all(self._membership.on_change(change, now_s=self._clock_s))
                if change.name == BROKER:  # that what is told here was stored is its return
                    await self._publish_all(self._membership.on_report(change.name, now_s=self._clock_s))

    async def run_reports(self) -> None:
        """Tell who is heard again, who joins, and who has joined and falls silent; until cancelled."""
        async with anyio.create_task_group() as loops:
            loops.start_soon(self._run_checks)
            async with self._bus.subscribe(self._bus.names.all_metrics) as messages:
                async for subject, data in messages:
                    group = group_of_metrics(subject)
                    if len(group) > MAX_GROUP_CHARACTERS or not TOKEN.fullmatch(group):  # it is to become a key
                        log.warning("report.of_nobody", subject=subject)
                        continue
                    if _is_farewell(data, subject):
                        await self._publish_all(self._membership.on_farewell(group))
                    else:
                        await self._publish_all(self._membership.on_report(group, now_s=self._clock_s))

    async def _run_checks(self) -> None:
        clock = AwakeClock(self._clock_s, interval_s=TICK_S)
        while True:
            await anyio.sleep(TICK_S)
            self._clock_s = clock.tick(time.monotonic())
            await self._publish_all(self._membership.check(now_s=self._clock_s))

    async def _publish_all(self, news: Iterator[Event | CrewState]) -> None:
        for one in list(news):
            await self._publish(one)

    async def _publish(self, news: Event | CrewState) -> None:
        if isinstance(news, Event):
            await self._bus.publish_event(news)
            return
        self._reasons[news.name] = reason = news.reason or self._reasons.get(news.name, "")
        await self._bus.put(self._bus.names.crew_key(news.name), msgspec.structs.replace(news, reason=reason))


def group_of_metrics(subject: str) -> str:
    """Return the process group of which a process speaks on a metrics subject."""
    role, _, instance = subject.split(".", 3)[-1].partition(".")
    return f"node-{instance}" if role == "node" else role


def _is_farewell(data: bytes, subject: str) -> bool:
    if b'"ended"' not in data:  # spares decoding everything that everybody says
        return False
    try:
        return decode_json(data, dict, what=subject).get("state") == wait_graph.ENDED
    except WireError:
        return False
