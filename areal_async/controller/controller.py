"""The controller: admits groups by credit, keeps the accounts, and says when the run has ended.

``run_log``       consumes outcomes and cuts; produces the books (``Accounts``); unblocked by the trainer
``run_servers``   reads what the servers hold; produces returned credits; unblocked by nodes that swapped, or by the
                  silence of one that is gone, whose servers nobody waits for then
``run_admission`` waits for a credit; produces tickets, then moves the ``admitted`` record on
``run_steering``  follows the orders of operators; produces pauses of the admission
``run_changes``   follows the settings that operators change; produces another bound, another mix of the tasks, another
                  rhythm of evaluation
``run_metrics``   says every second where the books stand

Beside it run the evaluations (``EvaluationSchedule``), the arms (``ArmQuestions``) and the watch over who is alive
(``LivenessWatch``). All state is in the broker: the log, the ``admitted`` record, the keys of servers and arms. Kill it
anywhere.
"""

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import structlog

from areal_async.bus import Bus, Message, entries_after, serving
from areal_async.config.live import settings_now
from areal_async.config.settings import Settings
from areal_async.controller.accounts import ENDED_EARLY, Accounts, Readmission
from areal_async.controller.admission import (
    ADMISSION_BATCH,
    Admission,
    AdmissionOrder,
    left_over,
    missing_for_admission,
    next_admission,
)
from areal_async.controller.arm_orders import ArmOrders
from areal_async.controller.arms import ArmQuestions
from areal_async.controller.book_keeping import BooksSnapshots
from areal_async.controller.compare_orders import CompareOrders
from areal_async.controller.curriculum import Visits
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.evaluation_schedule import EvaluationSchedule
from areal_async.controller.fleets import FleetOrders
from areal_async.controller.gate import Gate
from areal_async.controller.host_orders import HostOrders
from areal_async.controller.no_step_alarm import NoStepAlarm
from areal_async.controller.pacing import Pacer
from areal_async.controller.processes.failure_detector import FailureDetector
from areal_async.controller.processes.liveness import LivenessWatch
from areal_async.controller.processes.reports import RunProgress, TrainersHold
from areal_async.controller.processes.watch import silence_after
from areal_async.controller.rollback import RollbackOrders
from areal_async.controller.row_images import RowImages
from areal_async.controller.steering import RunSteering
from areal_async.controller.tag_orders import TagOrders
from areal_async.controller.tasks import Tasks
from areal_async.errors import ConflictError, FencedError, PipelineError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.run_state import Changes, Control, RunState, ServerState
from areal_async.protocol.staleness import max_groups_in_flight
from areal_async.protocol.subjects import ADMITTED, CHANGES, CONTROL, RUN_STATE
from areal_async.protocol.types import Admitted, Cut, GroupId, Outcome, OutcomeKind, Ticket, Version, WeightsVersion
from areal_async.telemetry import spans, wait_graph
from areal_async.vision.spec import VisionSpec

SERVER_POLL_S = 0.1
DISOWN_POLLS = 10
"""Every so many of these it looks for servers of nodes that are gone."""
METRICS_INTERVAL_S = 1.0

log = structlog.get_logger()


class Controller:
    """Owns the run's state, all of it in the broker."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        tasks: Tasks,
        evaluator: Evaluator | None,
        *,
        accounts: Accounts,
        vision: VisionSpec | None = None,
        detector: FailureDetector | None = None,
        report_s: float = METRICS_INTERVAL_S,
    ) -> None:
        """Take the run's state at the broker.

        Args:
            vision: how the run's model sees; ``None`` where it does not.
            report_s: seconds between two reports of where the books stand.
        """
        self._bus = bus
        self._settings = settings
        self._tasks = tasks
        self._rows = RowImages(bus, tasks, settings, vision)
        self._accounts = accounts
        self._report_s = report_s
        self._now = settings
        """The settings with what operators have changed."""
        self._visits = Visits()
        self._order = AdmissionOrder(settings, tasks, self._visits, record=accounts.admitted)
        self._snapshots = BooksSnapshots(bus, accounts, self._visits)
        self._admitted_revision = 0
        self._log_sequence = 0
        self._no_step_alarm = NoStepAlarm(accounts)
        self._pacer = Pacer(batch_groups=settings.rollout.batch_groups)
        """Told of what happens from when this controller has read the log that it found."""
        self._progress = RunProgress()
        self._gate = Gate(bus, settings)
        self.evaluation = EvaluationSchedule(
            evaluator, settings, accounts=accounts, progress=self._progress, gate=self._gate
        )
        self._steering = RunSteering(
            bus,
            settings,
            evaluate=self.evaluation.ask,
            check=lambda setting: self._order.check_change(setting),
            follow=self._change,
        )
        self._liveness = LivenessWatch(
            bus=bus,
            run=settings.run,
            progress=self._progress,
            may_rest=lambda: self._steering.control.is_paused and not self.evaluation.waits_for,
            detector=detector or FailureDetector(),
            hold=TrainersHold(settings, silence_s=silence_after(settings.run.watchdog_s)),
        )
        self._arms = ArmQuestions(bus, tasks, accounts, row_at=self._row_at, directory=settings.run_directory)
        self._arm_orders = ArmOrders(bus, settings, tasks, lambda: accounts.admitted)
        self._compared = CompareOrders(bus, settings)
        self._hosts = HostOrders(bus, settings)
        self._tags = TagOrders(bus, settings)
        self._rollbacks = RollbackOrders(bus, settings, lambda: self._accounts.journal)
        self._fleets = FleetOrders(bus, settings.run_directory, lambda: self._liveness.present)
        self._waits_for = ""

    @property
    def waits_for(self) -> str:
        """What the next admission waits for; empty while it does not."""
        return self._rows.waits_for or self._waits_for

    async def run(self) -> None:
        """Run until the last version is held and evaluated.

        Raises:
            PipelineError: too many groups failed one after another.
        """
        await self._take_over()
        self._order = AdmissionOrder(self._settings, self._tasks, self._visits, record=self._accounts.admitted)
        await self._arm_orders.take_up_settings()
        control, _ = await self._bus.get(CONTROL, Control)  # before anything is admitted: a pause outlives a controller
        self._steering.control = control or Control()
        changes, _ = await self._bus.get(CHANGES, Changes)
        self._change(changes or Changes())
        async with anyio.create_task_group() as loops:
            watching = (self.run_servers, self._liveness.run_stalls, self.run_metrics, self._liveness.run_reports)
            for loop in (*watching, self.run_steering, self.run_changes):
                loops.start_soon(loop)
            self._log_sequence = await self._snapshots.restore(has_curriculum=self._has_curriculum)
            await self._read_existing_log()
            self._pacer = Pacer(batch_groups=self._settings.rollout.batch_groups)
            self._no_step_alarm.check(self._now)  # what this finds, the controller before has told
            self._accounts.num_consecutive_failed = 0  # of an earlier start: who resumes the run has mended the cause
            loops.start_soon(self.run_log)
            loops.start_soon(self.run_admission)
            loops.start_soon(self._arms.run)
            loops.start_soon(self._compared.run_leases)
            await self.evaluation.run()
            loops.cancel_scope.cancel()
        await self._abandon_unfinished()
        await self._bus.put(RUN_STATE, RunState(state="finished"))
        log.info("run.finished", admitted=self._accounts.admitted.total, settled=self._accounts.num_settled)

    async def _take_over(self) -> None:
        """Have the record to oneself: another controller that still lives can move it no more, and must stop.

        Before the first ticket, too: it could put another mix of the tasks on record from a position of which we have
        published one.
        """
        while True:
            record, revision = await self._bus.get(ADMITTED, Admitted)
            self._accounts.admitted = record or Admitted()
            with suppress(ConflictError):  # it admitted once more
                self._admitted_revision = await self._bus.compare_and_set(ADMITTED, self._accounts.admitted, revision)
                return

    # readers

    async def _read_existing_log(self) -> None:
        async for message in entries_after(self._bus, self._log_sequence):
            await self._read(message)

    @property
    def _has_curriculum(self) -> bool:
        return self._order.curriculum is not None

    async def run_log(self) -> None:
        """Follow the log until cancelled."""
        names = self._bus.names
        async for message in self._bus.follow(names.outcomes_stream, names.log, start_sequence=self._log_sequence + 1):
            await self._read(message)
            await self._snapshots.offer(message, has_curriculum=self._has_curriculum)
            self._progress.announce()
            self._stop_after_failures()
            if alarm := self._no_step_alarm.check(self._now):
                log.warning(alarm.kind, name=alarm.name, sentence=alarm.sentence)
                await self._bus.publish_event(alarm)

    async def _read(self, message: Message) -> None:
        entry = await self._bus.decode(message, Cut if message.subject == self._bus.names.cuts else Outcome)
        self._log_sequence = message.sequence
        if isinstance(entry, Cut):
            # Who may store trajectories may name any group; one that was not admitted has no credit to return.
            entry = msgspec.structs.replace(entry, groups=[one for one in entry.groups if self._counts(one.group_id)])
            self._accounts.add_cut(entry, sequence=message.sequence)
            self._pacer.note_cut(entry, now=anyio.current_time())
        elif isinstance(entry, Outcome) and not self._counts(entry.group_id):
            await self._bus.dead_letter(message, f"group {entry.group_id}: not admitted, of {len(self._tasks)} prompts")
            return
        elif isinstance(entry, Outcome):
            self._accounts.add_outcome(entry)
            self._pacer.note_outcome(entry)
        if self._has_curriculum and isinstance(entry, Cut | Outcome):
            self._visits.read(entry)

    def _counts(self, group_id: str) -> bool:
        """Say whether a group may have a ticket, and note one that has ended without."""
        group, accounts, order = GroupId.parse(group_id), self._accounts, self._order
        counts = group_id in accounts.readmitted if group.attempt else order.may_be_admitted(group, accounts.admitted)
        if not counts:
            accounts.ended_early.add(group_id)
        return counts

    def _stop_after_failures(self) -> None:
        limit = self._settings.run.max_failed_groups
        if self._accounts.num_consecutive_failed >= limit:
            raise PipelineError(
                f"run {self._settings.run.name}: {limit} groups failed one after another, "
                f"the last with: {self._accounts.last_failure}"
            )

    async def run_servers(self) -> None:
        """Take note of announced and held versions until cancelled."""
        entries: Mapping[str, tuple[ServerState, int]] = {}
        for number in itertools.count():
            seen, entries = entries, await self._bus.entries("server.", ServerState)
            newest, _ = await self._bus.get(self._bus.names.weights_key(), WeightsVersion)
            if entries != seen or newest != self.evaluation.newest:
                before, servers = self._accounts.held, [state for state, _ in entries.values()]
                self._accounts.hold(servers, newest=Version.parse(newest.version) if newest is not None else None)
                if newest is not None:
                    step = self._accounts.step_of(Version.parse(newest.version))
                    self._pacer.note_newest(step, now=anyio.current_time())
                if self._accounts.held != before or newest != self.evaluation.newest:
                    self.evaluation.newest = newest
                    self._progress.announce()
            if number % DISOWN_POLLS == 0:
                await self._liveness.disown_gone(entries)
            await anyio.sleep(SERVER_POLL_S)

    # admission

    async def run_admission(self) -> None:
        """Admit whenever there is a credit and the pacer wants it spent, until the last step's cut is journalled."""
        last_step = self._settings.run.steps
        while True:
            num_seen = self._progress.changed.num_rings
            control, order = self._steering.control, self._order
            paused = f"resume: {control.by or 'an operator'} has paused the run" if control.is_paused else ""
            self._waits_for = missing_for_admission(self._accounts, last_step=last_step) or paused
            count, look_in_s = self._num_wanted(), math.inf
            is_first = not self.evaluation.is_first_done
            if is_first:
                count = min(count, self._num_short_of_a_second_step)
            if not count and not self._waits_for:
                look_in_s = self._pacer.look_in_s
                self._waits_for = "the first evaluation" if is_first else "the time when its groups are needed"
            admission = next_admission(
                self._accounts,
                order.sampler,
                last_step=last_step,
                curriculum=order.curriculum,
                mixing=order.mixing(self._now),
                batch=min(count, ADMISSION_BATCH),
            )
            if admission is None or self._waits_for:
                with self.evaluation.waiting(wait_graph.ADMISSION), anyio.move_on_after(look_in_s):
                    await self._progress.changed.wait(num_seen)
            else:
                await self._admit(admission)

    @property
    def _is_eager(self) -> bool:
        return self._settings.rollout.admission == "eager"

    @property
    def _num_short_of_a_second_step(self) -> int:
        """How many more groups may be admitted before a second step could be trained of them."""
        return max(0, 2 * self._settings.rollout.batch_groups - 1 - self._accounts.num_in_flight)

    def _num_wanted(self) -> int:
        """Return how many groups are to be admitted now, within credit."""
        if self._is_eager:
            return self._accounts.num_credits
        return self._pacer.num_wanted(self._accounts, now=anyio.current_time())

    def _row_at(self, position: int) -> int:
        """Return the row at a place in the order of the data; where nobody can say any more, that of a later place."""
        mixes = self._accounts.admitted.mixes
        known_from = mixes[0].start if mixes else 0
        place = position if position >= known_from else known_from + position
        return self._order.sampler.group_at(place, mixes).index

    async def _admit(self, admission: Admission) -> None:
        """Publish tickets, then move the record: what a crash between repeats is de-duplicated by id."""
        failpoint("controller.before_tickets")
        async with anyio.create_task_group() as publishing:
            for number, item in enumerate(admission.items, start=admission.first_number):
                if str(item.group_id) in self._accounts.ended_early:  # nothing that comes of it would be trained
                    publishing.start_soon(self._end_early, item)
                else:
                    publishing.start_soon(self._publish_ticket, item, str(admission.version), number)
        failpoint("controller.before_cursor")
        try:
            self._admitted_revision = await self._bus.compare_and_set(
                ADMITTED, admission.record, self._admitted_revision
            )
        except ConflictError as exc:
            raise FencedError("controller: another controller of this run is admitting; this one must stop") from exc
        if admission.record.mixes != self._accounts.admitted.mixes:
            log.info("admission.mixed", mixes=msgspec.to_builtins(admission.record.mixes))
        self._accounts.admitted = admission.record
        admitted = ((str(item.group_id), self._tasks.name_at(item.group_id.index)) for item in admission.items)
        self._pacer.note_admitted(admitted, now=anyio.current_time())
        failpoint("controller.after_cursor")
        self._progress.announce()

    async def _publish_ticket(self, item: Readmission, version: str, number: int) -> None:
        workflow, row, images = await self._rows.ready(item.group_id.index, str(item.group_id))
        ticket = Ticket(
            group_id=str(item.group_id),
            workflow=workflow,
            row=row,
            images=images,
            group_size=self._settings.rollout_of(workflow).group_size,
            version=version,
            num_failed_attempts=item.num_failed_attempts,
            number=number,
        )
        with spans.admitted(ticket):
            await self._bus.publish(self._bus.names.tickets(workflow), ticket, msg_id=f"ticket.{item.group_id}")

    async def _end_early(self, item: Readmission) -> None:
        """Return the credit of a group that has an end already, and have its prompt tried under another name."""
        outcome = Outcome(
            group_id=str(item.group_id),
            kind=OutcomeKind.ABANDONED,
            lineage=self._accounts.journal.lineage,
            reason=ENDED_EARLY,
            num_failed_attempts=item.num_failed_attempts,
        )
        await self._publish_outcome("early", outcome)

    # the end

    async def _abandon_unfinished(self) -> None:
        """Record what was admitted and can never train now, after any other controller has been made to stop."""
        await self._take_over()
        await self._read_existing_log()
        outcomes = left_over(self._accounts, self._order.sampler, curriculum=self._order.curriculum)
        async with anyio.create_task_group() as publishing:
            for outcome in outcomes:
                publishing.start_soon(self._publish_outcome, "end", outcome)

    async def _publish_outcome(self, when: str, outcome: Outcome) -> None:
        with spans.settled(outcome):
            await self._bus.publish(self._bus.names.outcomes, outcome, msg_id=f"{when}.{outcome.group_id}")

    async def run_steering(self) -> None:
        """Answer operators, and note what they want, until cancelled."""
        async with serving(
            self._bus,
            description="admits groups and keeps the accounts",
            report=self.report,
            endpoints=[
                *self._steering.endpoints,
                *self._fleets.endpoints,
                *self._hosts.endpoints,
                *self._tags.endpoints,
                *self._arm_orders.endpoints,
                *self._compared.endpoints,
                *self._rollbacks.endpoints,
            ],
        ):
            async for control in self._bus.watch_key(CONTROL, Control):
                self._steering.see(control)
                self._progress.announce()

    async def run_changes(self) -> None:
        """Go by what operators have changed, until cancelled."""
        async for changes in self._bus.watch_key(CHANGES, Changes):
            self._change(changes)

    def _change(self, changes: Changes) -> None:
        now = self._now = self.evaluation.settings = self._gate.settings = settings_now(self._settings, changes)
        batch_groups = self._settings.rollout.batch_groups
        bound = max_groups_in_flight(max_staleness=now.rollout.max_staleness, batch_groups=batch_groups)
        self._accounts.max_groups_in_flight = bound
        self._progress.announce()

    # being watched

    def report(self) -> dict[str, Any]:
        """Say where the books stand."""
        accounts, control, evaluating = self._accounts, self._steering.control, self.evaluation.waits_for
        return {
            "steps": self._settings.run.steps,
            "max_staleness": self._now.rollout.max_staleness,
            "admitted": accounts.admitted.total,
            "skipped": accounts.admitted.num_skipped,
            "shares": self._order.shares(accounts.admitted),
            "settled": accounts.num_settled,
            "in_flight": accounts.num_in_flight,
            "credits": accounts.num_credits,
            "held": str(accounts.held or ""),
            "num_dead_letters": self._bus.num_dead_letters,
            "is_paused": control.is_paused,
            "quiet_s": round(self._progress.quiet_s, 1),
            "state": "paused" if control.is_paused else "evaluating" if evaluating else "admitting",
            "waits_for": evaluating or self.waits_for,
            "waits": wait_graph.report(wait_graph.CONTROLLER),
            "arms": self._arms.report(),
            **({} if self._is_eager else self._pacer.report(accounts, now=anyio.current_time())),
            **_together(self._no_step_alarm.report(), self._gate.report()),
        }

    async def run_metrics(self) -> None:
        """Say every second where the books stand."""
        while True:
            await self._bus.emit(self._bus.names.metrics("controller", "0"), msgspec.json.encode(self.report()))
            await anyio.sleep(self._report_s)


def _together(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two alarms say, as one report."""
    names = f"{first['alarm_names']} {second['alarm_names']}".strip()
    return {**first, **second, "alarms": [*first["alarms"], *second["alarms"]], "alarm_names": names}
