"""The processes of the model: the order of effects that production's loops have, over production's own rules.

What is decided is decided by ``Accounts``, ``next_admission``, ``BatchPlanner``, ``GroupOutcomes``, ``Inventory``,
``Journal``, ``Lineage``, ``is_settled`` and ``missing_siblings``, the very ones that run in production. Here they are
only carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_async.config.settings import CurriculumSettings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import Admission, Mixing, has_ended, left_over, next_admission
from areal_async.controller.curriculum import Curriculum, Visits
from areal_async.controller.pacing import Pacer
from areal_async.controller.sampler import TaskShare, sampler_of
from areal_async.errors import ConflictError, FencedError, StreamFullError
from areal_async.protocol.journal import Journal, without_slots
from areal_async.protocol.run_state import RunState, ServerState
from areal_async.protocol.subjects import ADMITTED, RUN_STATE
from areal_async.protocol.types import (
    Admitted,
    Cut,
    GroupId,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Version,
    WeightsVersion,
)
from areal_async.rollout.settled import is_settled
from areal_async.rollout.slots import missing_siblings
from tests.protocol.broker import NAMES, LogEntry, TicketDelivery, effect, idle
from tests.protocol.trainer import TrainerModel

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.protocol.broker import ModelBus, Pause
    from tests.protocol.world import Process, World


def read_entry(entry: LogEntry, books: Journal | Accounts, *, keeps_slots: bool = True) -> None:
    """Read one entry of the log, as every follower does."""
    if isinstance(entry.record, Cut):
        books.add_cut(entry.record if keeps_slots else without_slots(entry.record), sequence=entry.sequence)
    else:
        books.add_outcome(entry.record)


class Roles:
    """Makes processes. Planted faults replace its parts."""

    trainer = TrainerModel

    def main(self, world: World, process: Process) -> Coroutine[Pause, None, None]:
        model = {"controller": ControllerModel, "node": NodeModel, "trainer": self.trainer}[process.role]
        process.state = model(world, process)
        return process.state.run()  # type: ignore[no-any-return]


@dataclass(eq=False)
class ControllerModel:
    """``controller.Controller``."""

    world: World
    process: Process
    newest: WeightsVersion | None = None
    num_read: int = 0
    revision: int = 0
    is_over: bool = False
    """The run has ended: its other loops are cancelled."""

    def __post_init__(self) -> None:
        config = self.world.config
        self.bus: ModelBus = self.process.bus
        self.accounts = Accounts(max_groups_in_flight=config.max_groups_in_flight)
        self.sampler = sampler_of([TaskShare(count) for count in config.rows_of_tasks], seed=1)
        self.first_free = 0
        self.visits = Visits()
        self.curriculum = None if config.keep is None else self.make_curriculum(config.keep)
        self.pacer = self.make_pacer()

    def make_pacer(self) -> Pacer:
        """It predicts from the first group and the first step on."""
        return Pacer(batch_groups=self.world.config.batch_groups, min_durations=1, min_steps=1)

    def make_curriculum(self, keep: float) -> Curriculum:
        """Every epoch is a stretch."""
        settings = CurriculumSettings(name="pass_rate", keep=keep)
        return Curriculum(settings, self.sampler, self.visits, seed=1, min_stretch=1)

    async def run(self) -> None:
        self.revision = await self.take_over()
        record = self.accounts.admitted
        has_tickets = record.num_fresh or record.mixes
        self.first_free = record.num_fresh + self.world.config.max_groups_in_flight if has_tickets else 0
        self.process.spawn(self._run_servers())
        for entry in await self.bus.read_log("", ""):
            self._read(entry)
        self.pacer = self.make_pacer()
        self.process.spawn(self._run_log())
        self.process.spawn(self._run_admission())
        last_step = self.world.config.steps
        while not has_ended(self.accounts, self.newest, last_step=last_step):
            await idle()
        self.is_over = True
        await self.take_over()
        for entry in await self.bus.read_new(self.num_read):
            self._read(entry)
        for outcome in left_over(self.accounts, self.sampler, curriculum=self.curriculum):
            await self.bus.publish(NAMES.outcomes, outcome, msg_id=f"end.{outcome.group_id}")
        await self.bus.put(RUN_STATE, RunState(state="finished"))

    async def take_over(self) -> int:
        """Stop any other controller; return the revision by which the record is moved from here on.

        At the end nobody moves it: an admission that is under way then, and cancelled, has the one of before.
        """
        while True:
            record, revision = await self.bus.get(ADMITTED, Admitted)
            self.accounts.admitted = record or Admitted()
            try:
                return await self.bus.compare_and_set(ADMITTED, self.accounts.admitted, revision)
            except ConflictError:
                continue

    def _read(self, entry: LogEntry) -> None:
        read_entry(entry, self.accounts)
        if isinstance(entry.record, Cut):
            self.pacer.note_cut(entry.record, now=self.world.clock_s)
        else:
            self.pacer.note_outcome(entry.record)
        self.visits.read(entry.record)
        self.num_read += 1
        self.world.touch()

    async def _run_log(self) -> None:
        while not self.is_over:
            if not self.bus.has_new(self.num_read):
                await idle()
                continue
            for entry in (await self.bus.read_new(self.num_read))[:1]:
                self._read(entry)

    async def _run_servers(self) -> None:
        while True:
            servers = [state for state, _ in (await self.bus.entries("server.", ServerState)).values()]
            newest, _ = await self.bus.get(NAMES.weights_key(), WeightsVersion)
            before = self.accounts.held, self.newest
            self.accounts.hold(servers, newest=None if newest is None else Version.parse(newest.version))
            self.newest = newest
            if newest is not None:
                step = self.accounts.step_of(Version.parse(newest.version))
                self.pacer.note_newest(step, now=self.world.clock_s)
            if before != (self.accounts.held, newest):
                self.world.touch()
            await idle()

    async def _run_admission(self) -> None:
        last_step = self.world.config.steps
        while not self.is_over:
            count = self._num_wanted()
            admission = next_admission(
                self.accounts,
                self.sampler,
                last_step=last_step,
                curriculum=self.curriculum,
                mixing=Mixing(weights=self._wanted_weights(), earliest=self.first_free),
                batch=min(count, self.world.config.max_groups_in_flight),
            )
            self.world.oracle.seen["admission held back"] += count < self.accounts.num_credits
            if admission is None or not count:
                await idle()
                continue
            self.world.oracle.on_admission(
                total=admission.record.total,
                log_length=self.num_read,
                held=admission.version,
                num_settled=self.accounts.num_settled,
            )
            await self._admit(admission)

    def _num_wanted(self) -> int:
        if not self.world.config.is_paced:
            return self.accounts.num_credits
        return self.pacer.num_wanted(self.accounts, now=self.world.clock_s)

    def _wanted_weights(self) -> list[int]:
        """Return what operators want, who now and then want something else."""
        rng, weights = self.world.mix, self.world.weights
        if len(weights) > 1 and rng.random() < 0.1:
            weights[:] = rng.choice(([1, 1], [1, 0], [0, 1], [3, 1], [1, 2]))
        return list(weights)

    async def _admit(self, admission: Admission) -> None:
        await self._publish_tickets(admission)
        try:
            self.revision = await self.bus.compare_and_set(ADMITTED, admission.record, self.revision)
        except ConflictError as exc:
            raise FencedError("controller") from exc
        self.accounts.admitted = admission.record
        self.pacer.note_admitted(((str(item.group_id), "w") for item in admission.items), now=self.world.clock_s)

    async def _publish_tickets(self, admission: Admission) -> None:
        for number, item in enumerate(admission.items, start=admission.first_number):
            ticket = Ticket(
                group_id=str(item.group_id),
                workflow="w",
                row={},
                group_size=self.world.config.group_size,
                version=str(admission.version),
                num_failed_attempts=item.num_failed_attempts,
                number=number,
            )
            await self.bus.publish_ticket(ticket)


@dataclass(eq=False)
class NodeModel:
    """``node.run_node``, with one server."""

    world: World
    process: Process
    version: Version | None = None
    """What the server runs; None while it cannot serve."""
    must_fence: bool = False
    num_running: int = 0
    num_read: int = 0
    journal: Journal = field(default_factory=Journal)

    async def run(self) -> None:
        self.process.spawn(self._run_server())
        bus, capacity = self.process.bus, self.world.config.capacity
        while True:
            if self.version is None or self.num_running >= capacity or not bus.has_ticket():
                await idle()
                continue
            delivery = await bus.lease()
            if delivery is None:
                continue
            for entry in await bus.read_new(self.num_read):
                read_entry(entry, self.journal, keeps_slots=False)
                self.num_read += 1
            # One that comes for the first time is looked up where it has waited for long: here, every other prompt's.
            is_doubtful = delivery.num_delivered > 1 or GroupId.parse(delivery.ticket.group_id).index % 2 == 0
            if is_doubtful and is_settled(self.journal, delivery.ticket):
                await bus.ack_ticket(delivery)
            else:
                self.num_running += 1
                self.process.spawn(self._run_ticket(delivery))

    async def _run_server(self) -> None:
        bus = self.process.bus
        key = NAMES.server_key(f"s{self.process.place}")
        while True:
            newest, _ = await bus.get(NAMES.weights_key(), WeightsVersion)
            if self.must_fence:
                self.must_fence, self.version = False, None
                await bus.put(key, self._state("", fenced=True))
            elif newest is not None and newest.version != str(self.version):
                self.version = Version.parse(newest.version)
                await bus.put(key, self._state(newest.version))
            else:
                await idle()

    def _state(self, version: str, *, fenced: bool = False) -> ServerState:
        name = f"s{self.process.place}"
        return ServerState(server_id=name, node_id=name, url="", version=version, fenced=fenced)

    async def _run_ticket(self, delivery: TicketDelivery) -> None:
        bus, ticket = self.process.bus, delivery.ticket
        stored = await bus.stored_of(ticket.group_id) if delivery.num_delivered > 1 else []
        waiting = missing_siblings(ticket, stored)
        self.world.num_processes += 1
        producer = f"p{self.world.num_processes}"
        started: dict[int, Version] = {}
        rng, has_image = self.world.random, not self.world.config.has_images
        for _ in range(self.world.num_slow):
            await effect()
        while waiting:
            await effect()
            for sibling in waiting:
                if self.version is not None and rng.random() < 0.6:
                    started.setdefault(sibling, self.version)
            ready = [sibling for sibling in waiting if sibling in started and rng.random() < 0.7]
            if ready:
                slots = [self._slot(ticket, sibling, started[sibling], producer) for sibling in ready]
                if not has_image:
                    await bus.images.store(ticket.group_id)
                    has_image = True
                await self._store(ticket, slots, producer)
                waiting = [sibling for sibling in waiting if sibling not in ready]
        await bus.ack_ticket(delivery)
        self.num_running -= 1

    def _slot(self, ticket: Ticket, sibling: int, started: Version, producer: str) -> Slot:
        status = self.world.random.choices((SlotStatus.SCORED, SlotStatus.FAILED, SlotStatus.REJECTED), (80, 15, 5))[0]
        newest = started if self.version is None else self.version
        return Slot(
            sibling=sibling,
            sample_uid=f"{ticket.group_id}.{sibling}.{producer}",
            status=status,
            reward=float(GroupId.parse(ticket.group_id).index % 2),
            reason="" if status is SlotStatus.SCORED else "why",
            oldest=str(started),
            newest=str(newest),
        )

    async def _store(self, ticket: Ticket, slots: list[Slot], producer: str) -> None:
        message = StoredMessage(
            group_id=ticket.group_id,
            workflow=ticket.workflow,
            ticket_version=ticket.version,
            num_failed_attempts=ticket.num_failed_attempts,
            group_size=ticket.group_size,
            slots=slots,
            sequence=0,
            num_bytes=1,
            stored_ns=int(self.world.clock_s * 1e9),
        )
        siblings = "_".join(str(slot.sibling) for slot in slots)
        while True:
            try:
                await self.process.bus.store(message, f"{ticket.group_id}.{siblings}.{producer}")
                return
            except StreamFullError:
                await idle()
