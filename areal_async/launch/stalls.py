"""What the launcher does when the run stands still: it has all say where they stand, then restarts the culprit or ends.

The controller finds out and says who it is; the launcher owns the processes. It also watches the watcher: a controller
that is not heard any more cannot say that the run stands still, and over a broker that is frozen nobody can.

Invariant: nothing is done about what is starting, however often it was started, before it has spoken.
"""

import time

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import RunSettings
from areal_async.controller.processes.reports import AwakeClock
from areal_async.controller.processes.watch import silence_after
from areal_async.errors import PipelineError, WireError
from areal_async.launch.membership import group_of_metrics
from areal_async.launch.supervisor import Notify, RunSupervisor
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.protocol.wire import decode_json
from areal_async.telemetry import wait_graph
from areal_async.telemetry.wait_graph import STALLED, Stall

INTERVAL_S = 1.0
LAST_WORDS_S = 2.0
"""Between asking everybody where they stand and ending them."""

log = structlog.get_logger()


class StallWatch:
    """What the launcher does about a run that stands still, or of which nobody is heard."""

    def __init__(self, bus: Bus, settings: RunSettings, *, groups: RunSupervisor, notify: Notify) -> None:
        self._bus = bus
        self._settings = settings
        self._groups = groups
        self._notify = notify
        self._clock_s = time.monotonic()
        self._heard_s = self._clock_s
        self._controller_heard_s: float | None = None
        """``None`` before the first time, and once it was found to be silent."""
        self.spoken_in: dict[str, int] = {}
        """Process group -> the start since which it has spoken."""

    async def run(self) -> None:
        """Watch until cancelled.

        consumes:     the controller's events and everybody's metrics
        waits for:    the next one, or too long a silence
        produces:     stacks in the run's logs, and what ``run.on_stall`` asks for
        unblocked by: cancellation alone

        Raises:
            PipelineError: the run stands still, and is to end then.
        """
        async with anyio.create_task_group() as loops:
            for loop in (self._run_events, self._run_metrics, self._run_silence):
                loops.start_soon(loop)

    async def _run_events(self) -> None:
        subject = self._bus.names.event(STALLED, wait_graph.CONTROLLER)
        async with self._bus.subscribe(subject) as events:
            async for _, data in events:
                try:
                    stall = decode_json(data, Stall, what=subject)
                except WireError:
                    continue
                await self._act(stall.culprit, stall.sentence, is_starting=stall.is_starting)

    async def _run_metrics(self) -> None:
        async with self._bus.subscribe(self._bus.names.all_metrics) as messages:
            async for subject, _ in messages:
                group = group_of_metrics(subject)
                self.spoken_in[group] = self._groups.num_starts(group)
                self._heard_s = self._clock_s
                if group == wait_graph.CONTROLLER:
                    self._controller_heard_s = self._clock_s

    async def _run_silence(self) -> None:
        clock = AwakeClock(self._clock_s, interval_s=INTERVAL_S)
        while True:
            await anyio.sleep(INTERVAL_S)
            self._clock_s = clock.tick(time.monotonic())
            if self._controller_heard_s is None:
                continue
            silent_s = self._clock_s - self._controller_heard_s
            if silent_s >= self._settings.watchdog_s:
                self._controller_heard_s = None
                await self._act_on_silence(silent_s)

    async def _act_on_silence(self, silent_s: float) -> None:
        is_alone = self._clock_s - self._heard_s < silence_after(self._settings.watchdog_s)
        culprit = wait_graph.CONTROLLER if is_alone else wait_graph.BROKER
        who = "the controller has not" if is_alone else "over the broker nobody has"
        sentence = f"{who} been heard for {silent_s:.0f} s"
        log.error(STALLED, quiet_s=round(silent_s), culprit=culprit, sentence=sentence)
        self._notify(f"{STALLED}: {sentence}")
        await self._act(culprit, sentence, is_starting=False)

    async def _act(self, culprit: str, sentence: str, *, is_starting: bool) -> None:
        self._groups.ask_stacks()
        group = group_of(culprit)
        if is_starting or (group is not None and self.spoken_in.get(group) != self._groups.num_starts(group)):
            return
        match self._settings.on_stall:
            case "restart" if group is not None and self._groups.num_starts(group):
                self._notify(f"{culprit} holds up the run: killing {group}, to start it again")
                self._groups.restart(group)
            case "restart":
                self._notify(f"{culprit} holds up the run, and is no process to be started again")
            case "end":
                await anyio.sleep(LAST_WORDS_S)
                cause = f"run {self._settings.name}: stood still: {sentence}"
                with anyio.move_on_after(LAST_WORDS_S):
                    await self._bus.put(RUN_STATE, RunState(state="failed", reason=cause))
                raise PipelineError(cause)


def group_of(culprit: str) -> str | None:
    """Return the process group that an entity of ``wait_graph`` belongs to; None for one that is in none."""
    kind, _, name = culprit.partition(" ")
    match kind:
        case "trainer" | "controller" if not name:
            return kind
        case "rank":
            return "trainer"
        case "node":
            return f"node-{name}"
        case "server":
            return f"node-{name.rpartition('-')[0]}"
    return None
