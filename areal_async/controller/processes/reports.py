"""What every process of the run said last, and whether any of it is progress.

Progress is: an outcome or a cut, an admission, a version newly held, an evaluation's result (the controller knows of
these itself), the trainer going from one thing to the next, and, on any node, a generated token or a finished
trajectory.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import msgspec

from areal_async.config.settings import Settings
from areal_async.process.bell import Bell
from areal_async.telemetry import wait_graph
from areal_async.telemetry.reports import FleetReport, fleet_in, servers_in, waits_in
from areal_async.telemetry.wait_graph import ENDED, WaitReport

NOT_FOR_NODES = (wait_graph.CONTROLLER, "rank")
"""No node waits for these."""
PROGRESS = {
    "node": ("num_generated_tokens", "num_scored", "num_failed", "num_rejected"),
    "trainer": ("state", "step"),
}
"""Role -> what of its report is different once it has got on."""
OTHERS = (wait_graph.TRAINER, wait_graph.CONTROLLER, "rank", "cut", "step", "checkpoint", "publication")
"""What these wait for is not for nodes to tell."""


class AwakeClock:
    """Seconds of this process's own activity. Invariant: a run that was stopped and goes on has not waited."""

    def __init__(self, now_s: float, *, interval_s: float) -> None:
        """Be ticked about every ``interval_s`` seconds."""
        self._interval_s = interval_s
        self._ticked_s = now_s
        self._slept_s = 0.0

    def tick(self, now_s: float) -> float:
        """Return the time, without that for which this process, which was to wake up, did not run at all."""
        overslept_s = now_s - self._ticked_s - self._interval_s
        if overslept_s > self._interval_s:
            self._slept_s += overslept_s
        self._ticked_s = now_s
        return now_s - self._slept_s


class RunProgress:
    """When the run made its last progress, in seconds of this process's own activity."""

    def __init__(self) -> None:
        self.clock_s = self._moved_s = time.monotonic()
        """The time now, as an ``AwakeClock`` told last."""
        self.changed = Bell()
        """Rings at each progress that is announced."""

    @property
    def quiet_s(self) -> float:
        """Seconds since the last progress."""
        return max(self.clock_s - self._moved_s, 0.0)

    def note(self) -> None:
        """Take in progress that nobody in this process waits for."""
        self._moved_s = self.clock_s

    def announce(self) -> None:
        """Take in progress, and wake all who wait for it."""
        self.note()
        self.changed.ring()


@dataclass(kw_only=True)
class ProcessReport:
    """What one process said last."""

    heard_s: float
    state: str = ""
    waits_for: str = ""
    read_waits: Callable[[], WaitReport] = WaitReport
    """Reads what it waits for in what it said: asked of all only when nothing moves, and they speak every second."""
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Servers of a node by id, each with ``version`` and ``fence``."""
    fleet: FleetReport | None = None
    """Of a node: how many servers it may have."""
    hold: str = ""
    """Step, by the version it makes, for which the trainer holds up generation."""
    progress: tuple[Any, ...] = ()

    @cached_property
    def waits(self) -> WaitReport:
        """What it waits for."""
        return self.read_waits()


class TrainersHold:
    """Whether the trainer holds up generation for a step, so that nothing need move: not for ever, nor in silence."""

    def __init__(self, settings: Settings, *, silence_s: float) -> None:
        """Take for how long the trainer may say nothing.

        A hold may last as long as a server that has just begun to start may take, for which it waits, and an episode
        for its step.
        """
        self._max_s = settings.inference.start_bound_s + settings.rollout.episode_deadline_s
        self._silence_s = silence_s
        self._hold = ""
        self._since_s = 0.0

    def is_on(self, trainer: ProcessReport | None, *, now_s: float) -> bool:
        """Judge by what the trainer said last."""
        hold = "" if trainer is None else trainer.hold
        if hold != self._hold:
            self._hold, self._since_s = hold, now_s
        if trainer is None or not hold:
            return False
        return now_s - self._since_s <= self._max_s and now_s - trainer.heard_s <= self._silence_s


class Reports:
    """What every process of the run said last, by the name that ``waits`` gives it."""

    def __init__(self) -> None:
        self.by_name: dict[str, ProcessReport] = {}
        self._lineage = 0
        """The newest trainer's."""

    def take(self, role: str, said: Mapping[str, Any], *, now_s: float) -> bool:
        """Note a report; say whether it tells of progress. What is no report is ignored."""
        name = _name_of(role, said)
        if name is None or (role == "trainer" and self._is_replaced(said)):
            return False
        if said.get("state") == ENDED:
            return self.by_name.pop(name, None) is not None
        heard = ProcessReport(
            heard_s=now_s,
            state=str(said.get("state", "")),
            waits_for=str(said.get("waits_for") or ""),
            read_waits=partial(_waits_in, role, said),
            servers=servers_in(said),
            fleet=fleet_in(said),
            hold=str(said.get("hold") or "") if name == wait_graph.TRAINER else "",
            progress=tuple(said.get(key) for key in PROGRESS.get(role, ())),
        )
        before = self.by_name.get(name)
        self.by_name[name] = heard
        return before is None or before.progress != heard.progress

    def _is_replaced(self, said: Mapping[str, Any]) -> bool:
        """Say whether a rank speaks that has a successor: it may live on, and what it does is no progress."""
        lineage = said.get("lineage")
        if not isinstance(lineage, int) or isinstance(lineage, bool):
            return False
        if lineage > self._lineage:  # its ranks may be fewer, and those of before say nothing more
            self._lineage = lineage
            for name in [one for one in self.by_name if wait_graph.kind_of(one) == "rank"]:
                del self.by_name[name]
        return lineage < self._lineage

    def summary(self) -> dict[str, str]:
        """Return in a few words what each process waits for, or else does."""
        return {name: heard.waits_for or heard.state for name, heard in sorted(self.by_name.items())}


def _name_of(role: str, said: Mapping[str, Any]) -> str | None:
    match role:
        case "node" if "node_id" in said:
            return wait_graph.node(str(said["node_id"]))
        case "trainer" if isinstance(said.get("rank"), int) and said["rank"] > 0:
            return wait_graph.rank(said["rank"])
        case "trainer" | "controller" if "state" in said:
            return role
    return None


def _waits_in(role: str, said: Mapping[str, Any]) -> WaitReport:
    told = waits_in(said)
    if role != "node":
        return told
    # A culprit that a node names at will would be killed for it: what others wait for is not for nodes to tell.
    kind_of = wait_graph.kind_of
    records = [
        one for one in told.records if kind_of(one.waiter) not in OTHERS and kind_of(one.on) not in NOT_FOR_NODES
    ]
    return msgspec.structs.replace(told, records=records)
