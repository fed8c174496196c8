"""The controller: admits groups by credit, evaluates, and says when the run has ended.

``run_log``       consumes outcomes and cuts; produces the books (``Accounts``); unblocked by the trainer
``run_servers``   reads what the servers hold; produces returned credits; unblocked by nodes that swapped, or by the
                  silence of one that is gone, whose servers nobody waits for then
``run_admission`` waits for a credit; produces tickets, then moves the ``admitted`` record on
``run_evaluation``waits for a version that is due and held; produces its evaluation; the first one goes
                  before the first admission, so that it speaks of version 0 alone
``run_steering``  follows the orders of operators; produces pauses of the admission
``run_changes``   follows the settings that operators change; produces another bound, another mix of the tasks, another
                  rhythm of evaluation
``run_watch``     says who waits for whom, and who is the culprit, when nothing has moved for ``watchdog_s``

All state is in the broker: the log, the ``admitted`` record, the servers' keys. Kill it anywhere.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import anyio
import msgspec
import structlog

from areal_async.bus import Bus, Message, Report, serving
from areal_async.config.live import settings_now
from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts, Readmission
from areal_async.controller.admission import Admission, has_ended, left_over, missing_for_admission, next_admission
from areal_async.controller.curriculum import Visits
from areal_async.controller.evaluation import Evaluator, newest_due_step
from areal_async.controller.failure_detector import FailureDetector
from areal_async.controller.no_step_alarm import NoStepAlarm
from areal_async.controller.order import Order
from areal_async.controller.reports import AwakeClock, Reports
from areal_async.controller.rights import check_permissions
from areal_async.controller.steering import RunSteering
from areal_async.controller.tasks import Tasks
from areal_async.controller.watch import explain, silence_after
from areal_async.errors import ConflictError, FencedError, PipelineError, UserError, WireError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.events import ServerFenced
from areal_async.protocol.fields import is_version
from areal_async.protocol.run_state import DISOWNED, Changes, Control, RunState, ServerState
from areal_async.protocol.staleness import max_groups_in_flight
from areal_async.protocol.subjects import ADMITTED, CHANGES, CONTROL, RUN_STATE
from areal_async.protocol.types import Admitted, Cut, GroupId, Outcome, Ticket, Version, WeightsVersion
from areal_async.protocol.wire import decode_json
from areal_async.telemetry import spans, wait_graph

SERVER_POLL_S = 0.1
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
        absence: FailureDetector | None = None,
        report_s: float = METRICS_INTERVAL_S,
    ) -> None:
        """``report_s``: how often it says where the books stand."""
        self._bus = bus
        self._settings = settings
        self._tasks = tasks
        self._evaluator = evaluator
        self._accounts = accounts
        self._drought = NoStepAlarm(accounts)
        self._visits = Visits()
        self._order = Order(settings, tasks, self._visits, record=accounts.admitted)
        self._admitted_revision = 0
        self._log_sequence = 0
        self._changed = anyio.Event()
        self._may_admit = evaluator is None
        self._newest: WeightsVersion | None = None
        self._reports = Reports()
        self._absence = absence or FailureDetector()
        self._report_s = report_s
        self._steering = RunSteering(
            bus, settings, evaluate=self.ask_evaluation, check=lambda setting: self._order.check_change(setting)
        )
        self._evaluation_asked: Version | None = None
        self._now = settings
        self._clock_s = self._moved_s = time.monotonic()
        self.waits_for = ""

    async def run(self) -> None:
        """Run until the last version is held and evaluated.

        Raises:
            PipelineError: too many groups failed one after another.
            UserError: the broker's permissions let it not do its work.
        """
        await check_permissions(self._bus)
        await self._take_over()
        self._order = Order(self._settings, self._tasks, self._visits, record=self._accounts.admitted)
        control, _ = await self._bus.get(CONTROL, Control)  # before anything is admitted: a pause outlives a controller
        self._steering.control = control or Control()
        changes, _ = await self._bus.get(CHANGES, Changes)
        self._change(changes or Changes())
        async with anyio.create_task_group() as loops:
            for loop in (self.run_servers, self.run_watch, self.run_metrics, self.run_listening):
                loops.start_soon(loop)
            loops.start_soon(self.run_steering)
            loops.start_soon(self.run_changes)
            await self._read_existing_log()
            self._drought.restore(self._now)
            self._accounts.num_consecutive_failed = 0  # of an earlier start: whoever resumes has mended the cause
            loops.start_soon(self.run_log)
            loops.start_soon(self.run_admission)
            await self.run_evaluation()
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
            try:
                self._admitted_revision = await self._bus.compare_and_set(ADMITTED, self._accounts.admitted, revision)
                return
            except ConflictError:
                continue  # it admitted once more

    # readers

    async def _read_existing_log(self) -> None:
        names = self._bus.names
        start_sequence = self._log_sequence + 1
        async for message in self._bus.find_messages(names.outcomes_stream, names.log, start_sequence=start_sequence):
            await self._read(message)

    async def run_log(self) -> None:
        """Follow the log for ever."""
        names = self._bus.names
        async for message in self._bus.follow(names.outcomes_stream, names.log, start_sequence=self._log_sequence + 1):
            await self._read(message)
            self._move()
            self._stop_after_failures()
            if alarm := self._drought.look(self._now):
                log.warning(alarm.kind, name=alarm.name, sentence=alarm.sentence)
                await self._bus.publish_event(alarm)

    async def _read(self, message: Message) -> None:
        entry = await self._bus.decode(message, Cut if message.subject == self._bus.names.cuts else Outcome)
        self._log_sequence = message.sequence
        if isinstance(entry, Cut):
            # Whoever may store trajectories may name any group; one that was not admitted has no credit to return.
            entry = msgspec.structs.replace(entry, groups=[one for one in entry.groups if self._may_be(one.group_id)])
            self._accounts.add_cut(entry, sequence=message.sequence)
        elif isinstance(entry, Outcome) and not self._may_be(entry.group_id):
            await self._bus.dead_letter(message, f"group {entry.group_id}: not admitted, of {len(self._tasks)} prompts")
            return
        elif isinstance(entry, Outcome):
            self._accounts.add_outcome(entry)
        if self._order.curriculum is not None and isinstance(entry, Cut | Outcome):
            self._visits.read(entry)

    def _may_be(self, group_id: str) -> bool:
        return self._order.may_be_admitted(GroupId.parse(group_id), self._accounts.admitted)

    def _stop_after_failures(self) -> None:
        limit = self._settings.run.max_failed_groups
        if self._accounts.num_consecutive_failed >= limit:
            raise PipelineError(
                f"run {self._settings.run.name}: {limit} groups failed one after another, "
                f"the last with: {self._accounts.last_failure}"
            )

    async def run_servers(self) -> None:
        """Take note of announced and held versions for ever."""
        while True:
            entries = await self._bus.entries("server.", ServerState)
            servers = [state for state, _ in entries.values()]
            newest, _ = await self._bus.get(self._bus.names.weights_key(), WeightsVersion)
            before = self._accounts.held
            self._accounts.hold(servers, newest=Version.parse(newest.version) if newest is not None else None)
            if self._accounts.held != before or newest != self._newest:
                self._newest = newest
                self._move()
            await self._disown_gone(entries)
            await anyio.sleep(SERVER_POLL_S)

    async def _disown_gone(self, entries: Mapping[str, tuple[ServerState, int]]) -> None:
        """Fence the servers of nodes that are gone for good: nobody is to wait for what they hold.

        A node that comes back claims its servers again. Where it speaks at this very moment, its word stands.
        """
        for key, (state, revision) in entries.items():
            self._absence.see(key, state.node_id, revision)
        gone = self._absence.gone(state.node_id for state, _ in entries.values() if not state.fenced)
        for key, (state, revision) in entries.items():
            if state.fenced or state.node_id not in gone:
                continue
            silent_s = round(self._absence.silent_s(state.node_id))
            disowned = msgspec.structs.replace(state, version="", fenced=True, reason=DISOWNED)
            try:
                self._absence.note_own(key, await self._bus.compare_and_set(key, disowned, revision))
            except ConflictError:
                continue
            log.warning("server.disowned", server_id=state.server_id, node_id=state.node_id, silent_s=silent_s)
            await self._bus.publish_event(
                ServerFenced(server_id=state.server_id, reason=f"node not heard for {silent_s} s")
            )

    async def run_listening(self) -> None:
        """Remember what the other roles say of themselves, for the watch."""
        async with self._bus.subscribe(self._bus.names.all_metrics) as messages:
            async for subject, data in messages:
                try:
                    said = decode_json(data, dict[str, Any], what=subject)
                except WireError as exc:
                    log.warning("report.unreadable", subject=subject, reason=str(exc))
                    continue
                role = subject.split(".")[3]
                if role == "controller":
                    self._absence.tick(time.monotonic())
                elif role == "node" and "node_id" in said:
                    self._absence.hear(str(said["node_id"]))
                if self._reports.take(role, said, now_s=self._clock_s):
                    self._moved_s = self._clock_s

    # admission

    async def run_admission(self) -> None:
        """Admit whenever there is a credit, until the last step's cut is journalled."""
        last_step = self._settings.run.steps
        while True:
            changed = self._changed
            self.waits_for = missing_for_admission(self._accounts, last_step=last_step)
            is_paused = self._steering.control.is_paused
            if is_paused and not self.waits_for:
                self.waits_for = f"resume: {self._steering.control.by or 'an operator'} has paused the run"
            if not self._may_admit and not self.waits_for:
                self.waits_for = "the first evaluation"
            admission = next_admission(
                self._accounts,
                self._order.sampler,
                last_step=last_step,
                curriculum=self._order.curriculum,
                mixing=self._order.mixing(self._now),
            )
            if admission is None or is_paused or not self._may_admit:
                with self._waiting(wait_graph.ADMISSION):
                    await changed.wait()
            else:
                await self._admit(admission)

    async def _admit(self, admission: Admission) -> None:
        """Publish tickets, then move the record: what a crash between repeats is de-duplicated by id."""
        failpoint("controller.before_tickets")
        async with anyio.create_task_group() as publishing:
            for number, item in enumerate(admission.items, start=admission.first_number):
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
        failpoint("controller.after_cursor")
        self._move()

    async def _publish_ticket(self, item: Readmission, version: str, number: int) -> None:
        workflow, row = self._tasks.at(item.group_id.index)
        ticket = Ticket(
            group_id=str(item.group_id),
            workflow=workflow,
            row=row,
            group_size=self._settings.rollout_of(workflow).group_size,
            version=version,
            num_failed_attempts=item.num_failed_attempts,
            number=number,
        )
        with spans.admitted(ticket):
            await self._bus.publish(self._bus.names.tickets(workflow), ticket, msg_id=f"ticket.{item.group_id}")

    # evaluation and the end

    async def run_evaluation(self) -> None:
        """Evaluate what is due until the final version is done."""
        last_step, evaluated = self._settings.run.steps, -1
        while True:
            changed = self._changed
            held, newest = self._accounts.held, self._newest
            if held is None or newest is None or held < Version.parse(newest.version) and newest.final:
                with self._waiting(wait_graph.CONTROLLER):
                    await changed.wait()
                continue
            due = newest_due_step(held.step, every_steps=self._now.eval.every_steps, last_step=last_step)
            if due > evaluated:
                evaluated = due
                if self._evaluator is not None and not await self._evaluator.is_done(due):
                    with wait_graph.on(wait_graph.evaluation(str(held)), waiter=wait_graph.CONTROLLER):
                        await self._evaluator.evaluate(held, due_step=due, on_result=self._move)
            elif self._evaluation_asked is not None and self._evaluator is not None:
                since, self._evaluation_asked = self._evaluation_asked, None
                if any(version >= since for version in await self._evaluator.made()):
                    continue  # one that was under way when it was asked for
                with wait_graph.on(wait_graph.evaluation(str(held)), waiter=wait_graph.CONTROLLER):
                    await self._evaluator.evaluate(held, due_step=held.step, on_result=self._move)
                continue
            if not self._may_admit:
                self._may_admit = True
                self._move()
            if has_ended(self._accounts, newest, last_step=last_step):
                return
            with self._waiting(wait_graph.CONTROLLER):
                await changed.wait()

    async def ask_evaluation(self, body: Report) -> Report:
        """Answer an operator with an evaluation of what the servers hold now, or begin it.

        Whoever asks names the version that the first answer named, and asks again until there are records: those of the
        oldest evaluation that began with that version or a newer one. So it does no harm to ask another controller.

        Raises:
            UserError: the run has no held-out rows, or no weights yet; or ``version`` is none.
        """
        held = self._accounts.held
        if self._evaluator is None:
            raise UserError(f"run {self._settings.run.name}: has no held-out rows to evaluate; set eval.dataset")
        if held is None and not body.get("version"):
            raise UserError(f"run {self._settings.run.name}: no server holds weights yet; ask again in a while")
        wanted = str(body.get("version") or held)
        if not is_version(wanted):
            raise UserError(f"version: got {wanted:.100}, need one like 1-42")
        since = Version.parse(wanted)
        made = await self._evaluator.made()
        found = min((version for version in made if version >= since), default=None)
        if found is None and self._evaluation_asked is None:
            self._evaluation_asked = since
            self._move()
        records = made[found] if found is not None else []
        return {"version": wanted, "records": msgspec.to_builtins(records)}

    async def _abandon_unfinished(self) -> None:
        """Record what was admitted and can never train now, after any other controller has been made to stop."""
        await self._take_over()
        await self._read_existing_log()
        outcomes = left_over(self._accounts, self._order.sampler, curriculum=self._order.curriculum)
        async with anyio.create_task_group() as publishing:
            for outcome in outcomes:
                publishing.start_soon(self._publish_outcome, outcome)

    async def _publish_outcome(self, outcome: Outcome) -> None:
        with spans.settled(outcome):
            await self._bus.publish(self._bus.names.outcomes, outcome, msg_id=f"end.{outcome.group_id}")

    async def run_steering(self) -> None:
        """Answer operators, and note what they want, for ever."""
        async with serving(
            self._bus,
            description="admits groups and keeps the accounts",
            report=self.report,
            endpoints=self._steering.endpoints,
        ):
            async for control in self._bus.watch_key(CONTROL, Control):
                if control.is_paused != self._steering.control.is_paused:
                    log.info("run.paused" if control.is_paused else "run.resumed", by=control.by)
                self._steering.control = control
                self._move()

    async def run_changes(self) -> None:
        """Go by what operators have changed, for ever."""
        async for changes in self._bus.watch_key(CHANGES, Changes):
            self._change(changes)

    def _change(self, changes: Changes) -> None:
        now = self._now = settings_now(self._settings, changes)
        batch_groups = self._settings.rollout.batch_groups
        bound = max_groups_in_flight(max_staleness=now.rollout.max_staleness, batch_groups=batch_groups)
        self._accounts.max_groups_in_flight = bound
        self._move()

    # being watched

    def report(self) -> dict[str, Any]:
        """Say where the books stand."""
        accounts, control = self._accounts, self._steering.control
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
            "quiet_s": round(max(self._clock_s - self._moved_s, 0.0), 1),
            "state": "paused" if control.is_paused else self._state,
            "waits_for": (self._evaluator and self._evaluator.waits_for) or self.waits_for,
            "waits": wait_graph.report(wait_graph.CONTROLLER),
            **self._drought.report(),
        }

    @property
    def _state(self) -> str:
        return "evaluating" if self._evaluator and self._evaluator.waits_for else "admitting"

    async def run_metrics(self) -> None:
        """Say every second where the books stand."""
        while True:
            await self._bus.emit(self._bus.names.metrics("controller", "0"), msgspec.json.encode(self.report()))
            await anyio.sleep(self._report_s)

    async def run_watch(self) -> None:
        """Say, when nothing has moved for ``watchdog_s``, who waits for whom, and who is the culprit."""
        run = self._settings.run
        interval_s = min(METRICS_INTERVAL_S, run.watchdog_s / 10)
        clock = AwakeClock(time.monotonic(), interval_s=interval_s)
        while True:
            await anyio.sleep(interval_s)
            self._clock_s = clock.tick(time.monotonic())
            if self._steering.control.is_paused and self._has_nothing_to_finish:
                self._moved_s = self._clock_s  # nothing moves because nobody wants it to
            quiet_s = self._clock_s - self._moved_s
            if quiet_s >= run.watchdog_s:
                await self._tell_stall(quiet_s)
                self._moved_s = self._clock_s

    @property
    def _has_nothing_to_finish(self) -> bool:
        """Whether what was admitted before a pause is done, as far as the other roles have said."""
        if self._evaluator and self._evaluator.waits_for:
            return False
        idle = {"node": "runs 0 groups", "trainer": "waiting"}
        # A node that is gone has left its last words behind.
        said = [
            (name.split()[0], heard.state)
            for name, heard in self._reports.by_name.items()
            if not name.startswith("node ") or self._clock_s - heard.heard_s <= self._absence.lost_s
        ]
        return all(state.startswith(idle.get(role, "")) for role, state in said)

    async def _tell_stall(self, quiet_s: float) -> None:
        silence_s = silence_after(self._settings.run.watchdog_s)
        verdict = explain(self._reports.by_name, now_s=self._clock_s, silence_s=silence_s)
        stall = wait_graph.Stall(
            quiet_s=round(quiet_s),
            sentence=verdict.sentence,
            culprit=verdict.culprit,
            chain=verdict.chain,
            is_starting=verdict.is_starting,
            waits_for=self._reports.summary(),
        )
        log.error(stall.kind, sentence=stall.sentence, culprit=stall.culprit, quiet_s=stall.quiet_s, **stall.waits_for)
        await self._bus.publish_event(stall)

    def _waiting(self, waiter: str) -> AbstractContextManager[wait_graph.Wait]:
        """Register a wait for the next change of the books, as one for whoever is to bring it about."""
        if waiter == wait_graph.ADMISSION and self._accounts.held is not None and not self._may_admit:
            return wait_graph.on(wait_graph.evaluation(str(self._accounts.held)), waiter=waiter)
        newest = self._newest
        if newest is not None and str(self._accounts.held) != newest.version:
            return wait_graph.on(wait_graph.weights(newest.version), "all servers to hold", waiter=waiter)
        return wait_graph.on(wait_graph.TRAINER, "the progress of", waiter=waiter)

    def _move(self) -> None:
        self._moved_s = self._clock_s
        self._changed.set()
        self._changed = anyio.Event()
