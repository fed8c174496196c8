"""The broker and the disk as small states in memory, with the same guarantees and the same faults as the real ones.

Every operation of ``ModelBus`` waits once before its effect, so whoever steps a process can cut it there; the
effect itself is atomic. ``ModelBus`` has the shape of ``Bus`` where production code (``Lineage``) runs on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from areal_async.bus.images import Images
from areal_async.bus.sweep import StoredSequences
from areal_async.errors import BusError, ConflictError, ConsumerGoneError, StreamFullError
from areal_async.protocol import wire
from areal_async.protocol.events import Event
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.subjects import JOURNAL, ROLLBACK, Names
from areal_async.protocol.types import Cut, Outcome, Record, StoredMessage, Ticket

if TYPE_CHECKING:
    from tests.protocol.world import World

NAMES = Names("model")
KEYS, LOG = "keys", "log"
"""What a process has seen as a whole, beside single keys and subjects."""


class Pause(Enum):
    """What a process says when it is stepped."""

    EFFECT = auto()
    """The next step carries out an effect."""
    IDLE = auto()
    """Nothing to do until something changes."""


class _Pausing:
    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    def __await__(self) -> Generator[Pause, None, None]:
        yield self._pause


async def effect() -> None:
    """Wait to be stepped; what follows up to the next wait happens at once."""
    await _Pausing(Pause.EFFECT)


async def idle() -> None:
    """Wait for a change."""
    await _Pausing(Pause.IDLE)


class LogEntry(NamedTuple):
    """An entry of the log, as every reader sees it."""

    sequence: int
    subject: str
    record: Cut | Outcome
    author: int
    """Lineage of the trainer that wrote it; 0 for the controller."""

    @property
    def data(self) -> bytes:
        return wire.encode(self.record)


@dataclass(slots=True)
class Lease:
    """A ticket in its stream."""

    ticket: Ticket
    sequence: int
    stored_ns: int = 0
    num_delivered: int = 0
    holder: int | None = None
    """Number of the process that has it now."""


@dataclass(slots=True)
class Consumer:
    """A trainer's view of the trajectories: what it has not been given yet."""

    pending: deque[int] = field(default_factory=deque)


class TicketDelivery(NamedTuple):
    """A leased ticket."""

    ticket: Ticket
    sequence: int
    num_delivered: int


@dataclass(slots=True)
class Broker:
    """What is stored."""

    max_messages: int
    """Room in the stream of trajectories."""
    log: list[LogEntry] = field(default_factory=list)
    last_cut_sequence: int = 0
    keys: dict[str, tuple[Record, int]] = field(default_factory=dict)
    revision: int = 0
    writes: list[tuple[int, str, Record]] = field(default_factory=list)
    """Every write of a key, by revision: what servers that are not up to date hold is a beginning of it."""
    tickets: dict[int, Lease] = field(default_factory=dict)
    trajectories: dict[int, StoredMessage] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    """Groups of which an image is stored."""
    consumers: dict[int, Consumer] = field(default_factory=dict)
    dying: set[int] = field(default_factory=set)
    """Lineages whose consumer the cluster has deleted, and the leader of the stream has not heard of it yet."""
    known_ids: set[str] = field(default_factory=set)
    """Message ids within the duplicate window."""
    num_stored: int = 0

    def next_sequence(self) -> int:
        self.num_stored += 1
        return self.num_stored

    def is_known(self, msg_id: str) -> bool:
        """Say whether a message came before; remember it."""
        if msg_id in self.known_ids:
            return True
        self.known_ids.add(msg_id)
        return False

    def keys_at(self, revision: int) -> dict[str, tuple[Record, int]]:
        """Return the keys as they were."""
        if revision >= self.revision:
            return self.keys
        return {key: (record, at) for at, key, record in self.writes if at <= revision}

    @property
    def rollback(self) -> Rollback:
        """The newest order to go back."""
        order = self.keys.get(ROLLBACK, (Rollback(), 0))[0]
        assert isinstance(order, Rollback)
        return order

    def write(self, key: str, record: Record) -> int:
        """Write a key, whatever it has been; return the revision."""
        self.revision += 1
        self.keys[key] = record, self.revision
        self.writes.append((self.revision, key, record))
        return self.revision

    def delete_message(self, sequence: int) -> StoredMessage | None:
        for consumer in self.consumers.values():
            if sequence in consumer.pending:
                consumer.pending.remove(sequence)
        return self.trajectories.pop(sequence, None)


class ModelBus:
    """One process's access to the broker."""

    names = NAMES

    def __init__(self, world: World, *, owner: int) -> None:
        self._world = world
        self._broker = world.broker
        self._owner = owner
        self.lineage = 0
        """Of the trainer that this is; for whoever judges what is written."""
        self.api = _Api(self)
        self.images = ModelImages(world)
        self.is_clustered = world.config.is_clustered
        self._seen: dict[str, int] = {}
        """How far each thing was when this process last read or wrote it: who knows less is not believed."""

    def _reach(self, what: str, latest: int, *, is_partial: bool = False) -> int:
        """Return how far the state reaches that answers a read: of a cluster, an old leader's or a follower's may.

        Args:
            is_partial: the read tells of one thing among others, and does not say how far the others are.
        """
        reach = self._world.old_reach(self.least_known(what), latest)
        if not is_partial:
            self._see(what, reach)
        return reach

    def least_known(self, what: str) -> int:
        """Return what an answer must know at least to be believed."""
        return self._seen.get(what, 0)

    def _see(self, what: str, reach: int) -> None:
        self._seen[what] = max(reach, self._seen.get(what, 0))

    # keys

    async def get(self, key: str, kind: type[Record]) -> tuple[Any, int]:
        if key == JOURNAL:
            return None, 0  # a snapshot decides nothing: nobody here keeps one, and no run is longer for that
        await effect()
        found = self._broker.keys_at(self._reach(key, self._broker.revision, is_partial=True)).get(key, (None, 0))
        self._see(key, found[1])
        return found

    async def entries(self, prefix: str, kind: type[Record]) -> dict[str, tuple[Any, int]]:
        await effect()
        keys = self._broker.keys_at(self._reach(KEYS, self._broker.revision))
        return {key: held for key, held in keys.items() if key.startswith(prefix)}

    async def put(self, key: str, record: Record) -> int:
        await effect()
        return self._set(key, record)

    async def compare_and_set(self, key: str, record: Record, revision: int) -> int:
        await effect()
        if self._broker.keys.get(key, (None, 0))[1] != revision:
            raise ConflictError(f"key {key}: newer")
        self._world.oracle.on_key(key, record, self)
        return self._set(key, record)

    def _set(self, key: str, record: Record) -> int:
        self._world.touch()
        self._broker.write(key, record)
        self._see(key, self._broker.revision)
        self._see(KEYS, self._broker.revision)
        return self._broker.revision

    async def emit(self, subject: str, record: Record) -> None:
        """Core messages are hints here: every reader polls."""

    async def publish_event(self, event: Event) -> None:
        """Events are history: nobody here reads them."""

    # the log

    async def publish(
        self, subject: str, record: Record, *, msg_id: str = "", expected_last_subject_sequence: int | None = None
    ) -> LogEntry:
        """Store a cut or an outcome."""
        await effect()
        broker = self._broker
        assert isinstance(record, Cut | Outcome)
        if expected_last_subject_sequence not in (None, broker.last_cut_sequence):
            raise ConflictError(f"{subject}: newer than {expected_last_subject_sequence}")
        self._world.touch()
        entry = LogEntry(broker.next_sequence(), subject, record, self.lineage)
        if not msg_id or not broker.is_known(msg_id):
            broker.log.append(entry)
            if subject == NAMES.cuts:
                broker.last_cut_sequence = entry.sequence
                self._see(subject, len(broker.log))
            self._see(LOG, len(broker.log))
            self._world.oracle.on_log(entry)
        return entry

    async def read_log(self, stream: str, subject: str, *, start_sequence: int = 1) -> list[LogEntry]:
        await effect()
        return self._broker.log[: self._reach(LOG, len(self._broker.log))]

    async def find_messages(self, stream: str, subject: str, *, start_sequence: int = 1) -> AsyncIterator[LogEntry]:
        for entry in await self.read_log(stream, subject):
            if entry.sequence >= start_sequence:
                yield entry

    async def get_last(self, stream: str, subject: str) -> LogEntry | None:
        await effect()
        known = self._broker.log[: self._reach(subject, len(self._broker.log))]
        return next((entry for entry in reversed(known) if entry.subject == subject), None)

    async def decode(self, entry: LogEntry, kind: type[Record]) -> Record:
        """Return what the entry holds: nothing here is ever damaged."""
        assert isinstance(entry.record, kind)
        return entry.record

    async def read_new(self, num_read: int) -> list[LogEntry]:
        """Return what was added after the first ``num_read`` entries."""
        await effect()
        return self._broker.log[num_read : self._reach(LOG, len(self._broker.log))]

    def has_new(self, num_read: int) -> bool:
        return len(self._broker.log) > num_read

    # tickets

    async def publish_ticket(self, ticket: Ticket) -> None:
        await effect()
        if not self._broker.is_known(f"ticket.{ticket.group_id}"):
            self._world.touch()
            sequence = self._broker.next_sequence()
            self._broker.tickets[sequence] = Lease(ticket, sequence, int(self._world.clock_s * 1e9))
            self._world.oracle.on_ticket(ticket)

    async def read_tickets(self) -> list[Lease]:
        """Return the tickets that are stored, which are those nobody has acked."""
        await effect()
        return list(self._broker.tickets.values())

    async def lease(self) -> TicketDelivery | None:
        await effect()
        for lease in self._broker.tickets.values():
            if lease.holder is None:
                self._world.touch()
                lease.holder = self._owner
                lease.num_delivered += 1
                return TicketDelivery(lease.ticket, lease.sequence, lease.num_delivered)
        return None

    def has_ticket(self) -> bool:
        return any(lease.holder is None for lease in self._broker.tickets.values())

    async def ack_ticket(self, delivery: TicketDelivery) -> None:
        """Nobody confirms it: it can be lost, and then the lease runs out."""
        await effect()
        if self._world.has_fault("lose a ticket's ack"):
            self._world.expire(delivery.sequence)
            return
        self._world.touch()
        self._world.oracle.on_ticket_acked(delivery.ticket)
        self._broker.tickets.pop(delivery.sequence, None)

    # trajectories

    async def store(self, message: StoredMessage, msg_id: str) -> None:
        """Store a trajectory message, as often as its producer sends it.

        Raises:
            StreamFullError: no room.
        """
        await effect()
        broker = self._broker
        if len(broker.trajectories) >= broker.max_messages:
            raise StreamFullError("full")
        self._world.touch()
        copies = 2 if self._world.has_fault("store a message twice") else 1
        for _ in range(0 if broker.is_known(msg_id) else copies):
            sequence = broker.next_sequence()
            broker.trajectories[sequence] = msgspec.structs.replace(message, sequence=sequence)
            for consumer in broker.consumers.values():
                consumer.pending.append(sequence)
        self._world.oracle.on_stored(message)

    async def stored_of(self, group_id: str) -> list[StoredMessage]:
        await effect()
        return [message for message in self._broker.trajectories.values() if message.group_id == group_id]

    async def fetch(self, lineage: int) -> StoredMessage | None:
        """Take the next delivery of a trainer's consumer.

        Raises:
            ConsumerGoneError: a newer lineage has deleted it.
        """
        await effect()
        consumer = self._broker.consumers.get(lineage)
        if consumer is None:
            raise ConsumerGoneError(f"trainer-{lineage}")
        if not consumer.pending:
            return None
        self._world.touch()
        pending = consumer.pending
        if len(pending) > 1 and self._world.has_fault("deliver out of order"):
            pending.rotate(-1)
        return msgspec.structs.replace(self._broker.trajectories[pending.popleft()])  # each delivery is one of its own

    def has_pending(self, lineage: int) -> bool:
        consumer = self._broker.consumers.get(lineage)
        return consumer is None or bool(consumer.pending)

    async def list_stored(self) -> StoredSequences:
        await effect()
        held, last = self._broker.trajectories.keys(), self._broker.num_stored
        first = min(held, default=last + 1)
        return StoredSequences(first, last, frozenset(range(first, last + 1)) - held)

    async def purge(self, bound: int) -> bool:
        """Delete every trajectory message up to a sequence, whoever asks and whoever has seen them.

        False when no answer came: then it may or may not have been carried out.
        """
        await effect()
        self._world.touch()
        if self._world.has_fault("lose a purge"):
            return False
        for sequence in [one for one in self._broker.trajectories if one <= bound]:
            gone = self._broker.delete_message(sequence)
            assert gone is not None
            self._world.oracle.on_removed(gone, "purged")
        return not self._world.has_fault("lose the answer to a purge")

    async def ack(self, lineage: int, messages: list[StoredMessage]) -> None:
        """Ack deliveries one by one; one that is lost is delivered again."""
        for message in messages:
            await effect()
            self._world.touch()
            consumer = self._broker.consumers.get(lineage)
            if consumer is None and lineage not in self._broker.dying:
                continue  # fenced: it reaches nothing
            if self._world.has_fault("lose an ack"):
                if (
                    consumer
                    and message.sequence in self._broker.trajectories
                    and message.sequence not in consumer.pending
                ):
                    consumer.pending.append(message.sequence)
                continue
            gone = self._broker.delete_message(message.sequence)
            if gone is not None:
                self._world.oracle.on_removed(gone, "acked")


class ModelImages(Images):
    """The stream of images, each group's under one name, with production's rules of what is removed when."""

    def __init__(self, world: World) -> None:
        self._names = NAMES
        self._world = world

    async def store(self, group_id: str) -> None:
        """Store a group's image, as ``put`` does."""
        await effect()
        if group_id not in self._world.broker.images:
            self._world.broker.images.add(group_id)
            self._world.touch()

    async def groups(self) -> list[str]:
        await effect()
        return sorted(self._world.broker.images)

    async def _purge(self, subject: str) -> None:
        await effect()
        group_id = subject.split(".")[3]
        if group_id in self._world.broker.images:  # another trainer may have been as fast
            self._world.broker.images.remove(group_id)
            self._world.touch()
            self._world.oracle.on_images_removed(group_id)


class _Api:
    """As much of the broker's own interface as ``take_trainer_consumer`` asks for."""

    def __init__(self, bus: ModelBus) -> None:
        self._bus = bus

    async def ask(self, subject: str, payload: Any = None) -> dict[str, Any]:
        await effect()
        broker = self._bus._broker
        self._bus._world.touch()
        what, _, name = subject.removeprefix("$JS.API.CONSUMER.").partition(f".{NAMES.trajectories_stream}")
        if what == "NAMES":
            return {"consumers": [f"trainer-{number}" for number in broker.consumers]}
        number = int(name.rpartition("-")[2])
        if what == "DELETE":
            if broker.consumers.pop(number, None) and self._bus.is_clustered:
                broker.dying.add(number)
        elif broker.consumers.keys() - {number}:
            raise BusError("a WorkQueue stream has one consumer")
        elif number not in broker.consumers:
            broker.consumers[number] = Consumer(deque(broker.trajectories))
        return {}

    async def leader_info(self, stream: str) -> dict[str, Any]:
        """Tell how many consumers the leader of the stream of trajectories knows; it hears of one end at a time."""
        await effect()
        broker = self._bus._broker
        num_consumers = len(broker.consumers) + len(broker.dying)
        self._bus._world.touch()
        if broker.dying:
            broker.dying.pop()
        return {"state": {"consumer_count": num_consumers}}

    def retry(self, what: str) -> Any:
        return _Retry()


class _Retry:
    last_seen = ""

    async def pause(self) -> None:
        await effect()
