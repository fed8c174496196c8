"""Rank 0's side of the bus: what is stored goes to the ``BatchPlanner``, and what that decides is carried out here.

``run_inbox``    consumes trajectory headers; produces open groups; unblocked by nodes that store slots
``run_tickets``  consumes tickets (read, never leased); produces open groups that have no slot yet
``run_images``   consumes the list of stored images; removes those of groups that are over; unblocked by ``settle``,
                 ``on_checkpoint`` and time
``run_journal``  waits for due groups and for a full batch; produces one journal entry per step; unblocked
                 by the two above, by its own deadlines, and by ``allow`` (no further ahead than staleness admits)

Order of effects: an outcome is stored, and only then the messages it speaks of are removed, at once or soon
(``bus.Sweep``); what a crash leaves behind is removed by the next lineage, which finds the outcome. A trained group's
messages stay until ``on_checkpoint``.
"""

from collections.abc import Iterable, Sequence

import anyio
import anyio.abc
import anyio.lowlevel
import structlog

from areal_async.bus import Bus, Delivery, Message
from areal_async.config.live import settings_now
from areal_async.config.settings import Settings
from areal_async.errors import StreamFullError, WireError
from areal_async.process.bell import Bell
from areal_async.process.failpoints import failpoint
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.events import GroupDead
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Changes
from areal_async.protocol.subjects import CHANGES
from areal_async.protocol.types import Cut, GroupId, Outcome, OutcomeKind, StoredMessage, Ticket, Version
from areal_async.protocol.wire import decode_headers
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.cut import Decision, RetryLater, Settle, StreamRoom
from areal_async.trainer.batch.image_sweep import ImageSweep
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.planner import BatchPlanner

INBOX_BATCH = 512
RECORDED_AT_ONCE = 64
"""Outcomes that are on their way to the log; to begin with a thousand would hold the loop for a tenth of a second."""
DECISION_POLL_S = 1.0
"""How soon deadlines are looked at when nothing has changed."""

log = structlog.get_logger()


class BatchFeed:
    """Does the input and output of one lineage's ``planner``."""

    def __init__(self, bus: Bus, settings: Settings, lineage: Lineage, journal: Journal) -> None:
        """``journal``: read through the entry that begins the lineage."""
        self._bus = bus
        self._settings = settings
        self.lineage = lineage
        self.planner: BatchPlanner[Delivery] = BatchPlanner(settings, journal, lineage=lineage.number)
        self._sweep = bus.sweep(bus.names.trajectories_stream, is_newest=lineage.is_newest)
        self._images = ImageSweep(
            bus, is_over=self.planner.is_over, has_nothing=self._has_nothing, is_newest=lineage.is_newest
        )
        self._limits = TrainingLimits(settings)
        self._caught_up = {"inbox": anyio.Event(), "tickets": anyio.Event()}
        self._changed = Bell()
        self._deciding = anyio.Lock()
        self.clock = PausableClock()
        """What groups are waited for by: it stands while the trainer holds up their generation."""
        self.waits_for = "the first trajectories"

    # what the trainer asks for

    @property
    def now(self) -> Settings:
        """The settings with what operators have changed."""
        return self.planner.settings

    def allow(self, step: int) -> None:
        """Let the planner cut up to ``step``."""
        self.planner.allow(step)
        self.notify()

    def stop(self) -> None:
        """Cut nothing more: the journal's next entry ends the lineage."""
        self.planner.is_stopping = True
        self.notify()

    def notify(self) -> None:
        """Have the planner asked again: something has changed."""
        self._changed.ring()

    async def give_up_cuts(self, *, after_step: int, why: str) -> None:
        """Give up the inherited cuts beyond ``after_step``: the first of them cannot be replayed, for this reason.

        Their groups are abandoned, to be admitted again, and ages count on both sides of that step from now on.
        """
        await self.lineage.write_cut(self.planner.branch(after_step=after_step))
        for step, groups in self.planner.give_up_cuts(after_step=after_step).items():
            what = f"its cut of step {step} could not be replayed"
            reason = f"{what}: {why}" if step == after_step + 1 else f"{what}: that of step {after_step + 1} could not"
            await self.settle(groups, OutcomeKind.ABANDONED, reason=reason, step=step)

    async def settle(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> None:
        """End groups without training them: record, then remove."""
        ids = list(group_ids)
        await self._record(self.planner.of_untrained(ids, kind, reason=reason, step=step))
        await self._sweep.settle(self.planner.release(ids))
        self._images.notify()

    async def on_checkpoint(self, step: int) -> None:
        """Record and remove what the checkpoint of ``step`` contains: on disk, and the newest by the bucket."""
        await self._record(self.planner.of_checkpoint(step))
        failpoint("trainer.before_acks")
        await self._sweep.settle(self.planner.release_cuts(step))
        self._images.notify()
        failpoint("trainer.after_acks")

    async def make_room(self) -> None:
        """Remove every settled message now, also where that takes an ack for each."""
        await self._sweep.flush()
        self.planner.image_room = await self._images.sweep()

    # its loops

    async def run_inbox(self) -> None:
        """Read trajectory headers until cancelled.

        What a broker had begun to send when it died counts as delivered, and would not come again for a day: after
        each loss of the connection, all that is not settled is asked for anew.
        """
        while True:
            await self._read_inbox()
            await self.lineage.take_consumer()

    async def _read_inbox(self) -> None:
        """Read until the connection has been lost."""
        names, caught_up, connection = self._bus.names, self._caught_up["inbox"], self._bus.connection
        num_losses = connection.num_losses
        async with self._bus.consume(names.trajectories_stream, names.trainer_consumer(self.lineage.number)) as inbox:
            while connection.num_losses == num_losses:
                deliveries = await inbox.fetch(INBOX_BATCH, wait_s=2.0 if caught_up.is_set() else 0.5)
                for delivery in deliveries:
                    await self._receive(delivery)
                    await anyio.lowlevel.checkpoint()  # a full read would hold the loop for a tenth of a second
                if len(deliveries) < INBOX_BATCH:
                    self.planner.is_caught_up = True
                    caught_up.set()  # a short read: the backlog is through
                if deliveries:
                    self.notify()

    async def run_changes(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Cut by what operators change, until cancelled; nothing is cut before what they had changed is known."""
        known, _ = await self._bus.get(CHANGES, Changes)
        self._change(known or Changes())
        task_status.started()
        async for changes in self._bus.watch_key(CHANGES, Changes):
            self._change(changes)

    def _change(self, changes: Changes) -> None:
        self.planner.settings = settings_now(self._settings, changes)
        self.notify()

    async def run_tickets(self) -> None:
        """Learn of admitted groups before any of their slots is stored, so that due ones are waited for."""
        names, sequence = self._bus.names, 0
        for message in await self._bus.read_log(names.tickets_stream, names.all_tickets):
            await self._add_ticket(message)
            sequence = message.sequence
        self._caught_up["tickets"].set()
        async for message in self._bus.follow(names.tickets_stream, names.all_tickets, start_sequence=sequence + 1):
            if await self._add_ticket(message):
                self.notify()

    async def run_images(self) -> None:
        """Remove the images of groups that are over, and see how full their stream is, until cancelled."""

        def on_room(room: StreamRoom) -> None:
            if room is not self.planner.image_room:
                self.planner.image_room = room
                self.notify()

        await self._images.run(on_room)

    async def run_journal(self, first_step: int) -> None:
        """Write the journal from ``first_step`` to the last step, or until ``stop``."""
        for reader in self._caught_up.values():
            await reader.wait()  # what was stored before this lineage may be due in its first step
        planner = self.planner
        planner.step = first_step
        with wait_graph.PollingWaits() as waiting:
            while not planner.has_ended:
                num_seen = self._changed.num_rings
                if min(self._room, self.planner.image_room) is not StreamRoom.AMPLE:
                    await self.make_room()
                async with self._deciding:
                    decision = planner.decide(now=self.clock.time(), room=self._room)
                    await self._carry_out(decision)
                if isinstance(decision, RetryLater):
                    self.waits_for = decision.what_for
                    waiting.replace(wait_graph.cut(planner.step), decision.on or (wait_graph.TRAINER,))
                    with anyio.move_on_after(DECISION_POLL_S):
                        await self._changed.wait(num_seen)
        self.waits_for = "nothing: the last cut is written"

    # inside

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Settle(group_ids, kind, reason):
                await self.settle(group_ids, kind, reason=reason, step=self.planner.step)
            case Cut() as entry:
                with spans.cut(entry, self.planner.messages.deliveries):
                    await self.lineage.write_cut(entry)
                self.planner.note_written(entry)
                log.info(
                    "journal.written",
                    kind=entry.kind,
                    step=entry.step,
                    num_groups=len(entry.groups),
                    num_open=len(self.planner.open),
                )

    def _has_nothing(self) -> bool:
        """Say whether nobody needs an image, as far as all that was stored before this lineage tells."""
        return self.planner.has_nothing and all(reader.is_set() for reader in self._caught_up.values())

    @property
    def _room(self) -> StreamRoom:
        num_bytes, settings = self.planner.messages.num_bytes + self._sweep.num_bytes, self._settings
        limit = settings.rollout.max_stream_bytes
        return StreamRoom.of(num_bytes, largest=settings.max_message_bytes, limit=limit)

    async def _add_ticket(self, message: Message) -> bool:
        """Note a ticket; say whether it is news."""
        ticket = await self._bus.decode(message, Ticket)
        if ticket is None:
            return False
        if Version.parse(ticket.version).lineage > self.lineage.number:
            await self._bus.dead_letter(
                message, f"got version {ticket.version}, newer than lineage {self.lineage.number}"
            )
            return False
        return self.planner.add_ticket(ticket, stored_ns=message.stored_ns)

    async def _receive(self, delivery: Delivery) -> None:
        """Take a stored message; record its slots that cannot be used, and remove what needs not be kept."""
        try:
            message = decode_headers(
                delivery.headers,
                sequence=delivery.sequence,
                num_bytes=delivery.stored_bytes,
                stored_ns=delivery.stored_ns,
            )
            self._check_origin(message, delivery)
            # Of a group that is cut the journal has the headers, and each payload is checked when it is fetched.
            if not self.planner.is_cut(message.group_id):
                self._limits.check_message(message)
        except WireError as exc:
            await self._give_up_group_of(delivery, str(exc))
            await self._bus.dead_letter(delivery, str(exc))
            return
        unusable = self.planner.receive(message, delivery)
        for outcome in unusable:
            await store_outcome(self._bus, outcome)
        await self._sweep.settle(self.planner.release_received(message, unusable))

    def _check_origin(self, message: StoredMessage, delivery: Delivery) -> None:
        """Hold a message against the subject it came on, and against what this lineage can know."""
        if delivery.subject != self._bus.names.trajectories(message.workflow, message.group_id):
            raise WireError(f"got slots of {message.workflow} {message.group_id} on {delivery.subject}")
        versions = [message.ticket_version, *(slot.newest for slot in message.slots)]
        newest = max(map(Version.parse, versions))
        if newest.lineage > self.lineage.number:
            raise WireError(f"got slots of version {newest}, newer than lineage {self.lineage.number}")

    async def _give_up_group_of(self, delivery: Delivery, reason: str) -> None:
        """End the group whose slots cannot be read: its ticket may be gone, so nobody else would."""
        group_id = delivery.subject.rpartition(".")[2]
        try:
            GroupId.parse(group_id)
        except ValueError:
            return
        async with self._deciding:  # a group that is in a cut which is being written trains
            if not self.planner.is_closed(group_id):
                reason = f"its stored message {delivery.sequence} cannot be read: {reason}"
                await self.settle([group_id], OutcomeKind.FAILED, reason=reason, step=self.planner.step)

    async def _record(self, outcomes: Sequence[Outcome]) -> None:
        for start in range(0, len(outcomes), RECORDED_AT_ONCE):
            async with anyio.create_task_group() as publishing:
                for outcome in outcomes[start : start + RECORDED_AT_ONCE]:
                    publishing.start_soon(store_outcome, self._bus, outcome)
        self.planner.note_recorded(outcomes)


async def store_outcome(bus: Bus, outcome: Outcome) -> None:
    """Record an outcome; once, however often it is said."""
    names = bus.names
    if outcome.kind is OutcomeKind.DEAD:
        try:
            await bus.publish(names.dead_groups, outcome, msg_id=f"dead.{outcome.group_id}")
        except StreamFullError:  # of letters that anybody may write; the same outcome is in the log, below
            log.warning("dead_letter.no_room", group_id=outcome.group_id, reason=outcome.reason)
        await bus.publish_event(GroupDead(group_id=outcome.group_id, reason=outcome.reason))
    uid = outcome.sample_uid or outcome.group_id
    with spans.settled(outcome):
        await bus.publish(names.outcomes, outcome, msg_id=f"{outcome.lineage}.{uid}.{outcome.kind}")


async def fail_group(bus: Bus, settings: Settings, cut: Cut, group_id: str, *, reason: str, lineage: int) -> None:
    """Record that a group of a cut has failed, from a rank that settles nothing else.

    Its messages stay, as in a crash.
    """
    journal = Journal(cuts={cut.step: cut})
    planner: BatchPlanner[Delivery] = BatchPlanner(settings, journal, lineage=lineage)
    for outcome in planner.of_untrained([group_id], OutcomeKind.FAILED, reason=reason, step=cut.step):
        await store_outcome(bus, outcome)
