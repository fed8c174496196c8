"""Who of the run is alive: nodes that are gone lose their servers, and of a run that stands still the culprit is named.

A node is judged by its silence (``FailureDetector``), a run by the time since its last progress (``RunProgress``).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import RunSettings
from areal_async.controller.processes.failure_detector import FailureDetector
from areal_async.controller.processes.reports import AwakeClock, ProcessReport, Reports, RunProgress, TrainersHold
from areal_async.controller.processes.watch import explain, silence_after
from areal_async.errors import ConflictError, WireError
from areal_async.protocol.events import ServerFenced
from areal_async.protocol.run_state import DISOWNED, ServerState
from areal_async.protocol.wire import decode_json
from areal_async.telemetry import wait_graph
from areal_async.telemetry.wait_graph import Stall

MAX_INTERVAL_S = 1.0
"""Seconds between two looks at how long nothing has moved."""
IDLE = {"node": "runs 0 groups", "trainer": "waiting"}
"""Role -> how its state begins once it has nothing to finish; other roles never have anything to."""

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class LivenessWatch:
    """What the roles of one run say of themselves, and what follows where they are silent."""

    bus: Bus
    run: RunSettings
    progress: RunProgress
    may_rest: Callable[[], bool]
    """Says whether nothing is to move once what was admitted is done, as in a run that is paused."""
    detector: FailureDetector
    hold: TrainersHold
    reports: Reports = field(default_factory=Reports)

    async def run_reports(self) -> None:
        """Remember what the roles say of themselves.

        consumes:     everybody's metrics
        waits for:    the next ones
        produces:     nothing
        unblocked by: cancellation alone
        """
        async with self.bus.subscribe(self.bus.names.all_metrics) as messages:
            async for subject, data in messages:
                try:
                    said = decode_json(data, dict[str, Any], what=subject)
                except WireError as exc:
                    log.warning("report.unreadable", subject=subject, reason=str(exc))
                    continue
                role = subject.split(".")[3]
                if role == "controller":
                    self.detector.tick(time.monotonic())
                elif role == "node" and "node_id" in said:
                    self.detector.on_report(str(said["node_id"]))
                if self.reports.take(role, said, now_s=self.progress.clock_s):
                    self.progress.note()

    @property
    def present(self) -> dict[str, ProcessReport]:
        """What each process said last that is not lost, by the name that ``wait_graph`` gives it."""
        now_s, lost_s = self.progress.clock_s, self.detector.lost_s
        return {name: heard for name, heard in self.reports.by_name.items() if now_s - heard.heard_s <= lost_s}

    async def run_stalls(self) -> None:
        """Say, when nothing has moved for ``watchdog_s`` seconds, who waits for whom, and who is the culprit.

        consumes:     what the roles said last
        waits for:    the next look
        produces:     an event
        unblocked by: cancellation alone
        """
        interval_s = min(MAX_INTERVAL_S, self.run.watchdog_s / 10)
        clock = AwakeClock(time.monotonic(), interval_s=interval_s)
        while True:
            await anyio.sleep(interval_s)
            self.progress.clock_s = clock.tick(time.monotonic())
            if self.hold.is_on(self.reports.by_name.get(wait_graph.TRAINER), now_s=self.progress.clock_s):
                self.progress.note()  # nothing is generated, as the trainer has the servers' GPUs
            if self.may_rest() and self._has_nothing_to_finish:
                self.progress.note()  # nothing moves because nobody wants it to
            if self.progress.quiet_s >= self.run.watchdog_s:
                await self._publish_stall(self.progress.quiet_s)
                self.progress.note()

    async def disown_gone(self, entries: Mapping[str, tuple[ServerState, int]]) -> None:
        """Fence the servers of nodes that are gone for good: nobody is to wait for them.

        A node that comes back claims its servers again. Where it speaks at this very moment, its word stands.

        Args:
            entries: the key of each server -> its state and the key's revision.
        """
        for key, (state, revision) in entries.items():
            self.detector.on_server_state(key, state.node_id, revision)
        gone = self.detector.gone(state.node_id for state, _ in entries.values() if state.is_waited_for)
        for key, (state, revision) in entries.items():
            if not state.is_waited_for or state.node_id not in gone:
                continue
            silent_s = round(self.detector.silent_s(state.node_id))
            try:
                self.detector.note_own(key, await self.bus.compare_and_set(key, state.gone(DISOWNED), revision))
            except ConflictError:
                continue
            log.warning("server.disowned", server_id=state.server_id, node_id=state.node_id, silent_s=silent_s)
            await self.bus.publish_event(
                ServerFenced(server_id=state.server_id, reason=f"node not heard for {silent_s} s")
            )

    @property
    def _has_nothing_to_finish(self) -> bool:
        """Whether what was admitted before a pause is done, as far as the roles have said."""
        # A node that is gone has left its last words behind.
        present = self.present
        said = [
            (name.split()[0], heard.state)
            for name, heard in self.reports.by_name.items()
            if not name.startswith("node ") or name in present
        ]
        return all(state.startswith(IDLE.get(role, "")) for role, state in said)

    async def _publish_stall(self, quiet_s: float) -> None:
        silence_s = silence_after(self.run.watchdog_s)
        verdict = explain(self.reports.by_name, now_s=self.progress.clock_s, silence_s=silence_s)
        stall = Stall(quiet_s=round(quiet_s), waits_for=self.reports.summary(), **verdict._asdict())
        log.error(stall.kind, sentence=stall.sentence, culprit=stall.culprit, quiet_s=stall.quiet_s, **stall.waits_for)
        await self.bus.publish_event(stall)
