"""A whole run in memory: processes that are stepped one effect at a time, and what may befall them.

A process is a set of coroutines over production's rules. Between any two effects it can be killed, or be left
behind as a zombie that goes on while another takes its place.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal_async.config.settings import Settings
from areal_async.errors import BusError, FencedError
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.staleness import max_groups_in_flight
from areal_async.protocol.subjects import ROLLBACK, RUN_STATE
from areal_async.protocol.types import Cut, Version, WeightsVersion
from tests.protocol.broker import NAMES, Broker, ModelBus, Pause
from tests.protocol.oracle import Content, Oracle

ARMED = (
    "lose a ticket's ack",
    "store a message twice",
    "deliver out of order",
    "lose an ack",
    "lose a purge",
    "lose the answer to a purge",
)
"""Faults that befall the next operation of their kind."""
MAX_ZOMBIES = 2
JUMP_EVERY, SLOW = 120, 30
"""After so many effects groups take so many more of them than before, or as many as at first."""
OLD_SHARE = 0.15
"""Of a cluster's answers: they come from a server that is not up to date."""
ORDERED_AT_ONCE = 0.7
"""Of the orders to go back: the others wait for a trainer that begins anyway."""
STALLED_SHARE = 0.6
"""Of the replaced processes: they stand still until something wakes them."""


class Config(NamedTuple):
    """The settings of a run, as small as they can be and still meet each other."""

    steps: int = 3
    group_size: int = 2
    min_group_size: int = 1
    batch_groups: int = 2
    max_staleness: int = 1
    when_stale: str = "wait"
    max_attempts: int = 2
    checkpoint_every: int = 2
    num_rows: int = 3
    num_nodes: int = 2
    capacity: int = 2
    """Tickets that a node runs at once."""
    max_messages: int = 1000
    loses_payloads: bool = True
    max_held: int = 2
    """Settled messages that wait for older ones."""
    keep: float | None = None
    """Share of the prompts that a curriculum admits though they teach nothing; None for no curriculum."""
    num_tasks: int = 1
    """Between whom the rows are parted; the mix of several changes on the way."""
    is_clustered: bool = False
    """Whether the broker has several servers, of which one that is not up to date may answer a read."""
    goes_back: bool = False
    """Whether operators have it go on from an earlier checkpoint, now and then."""
    has_images: bool = False
    """Whether each trajectory shows an image, the same for all of a group."""
    is_paced: bool = False
    """Whether groups are admitted as late as the trainer need not wait for them; how long they take jumps."""

    @property
    def rows_of_tasks(self) -> list[int]:
        """How many rows each task has."""
        first = self.num_rows // self.num_tasks
        return [first] * (self.num_tasks - 1) + [self.num_rows - first * (self.num_tasks - 1)]

    @property
    def max_groups_in_flight(self) -> int:
        """Which is how many tickets can be published before the record moves on."""
        return max_groups_in_flight(max_staleness=self.max_staleness, batch_groups=self.batch_groups)

    @property
    def settings(self) -> Settings:
        """What a trainer is told of it."""
        of_rollout = (
            "group_size", "min_group_size", "batch_groups", "max_staleness", "when_stale", "max_attempts",
        )  # fmt: skip
        rollout = {name: getattr(self, name) for name in of_rollout}
        return Settings.model_validate({"run": {"steps": self.steps}, "rollout": rollout})


def any_config(rng: random.Random) -> Config:
    """Draw settings."""
    group_size = rng.choice((1, 2, 2, 3))
    batch_groups = rng.choice((1, 2))
    max_staleness = rng.choice((0, 1, 1, 2))
    in_flight = (max_staleness + 1) * batch_groups * group_size
    config = Config(
        steps=rng.choice((2, 3, 4, 5)),
        group_size=group_size,
        min_group_size=rng.randint(1, group_size),
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        when_stale=rng.choice(("wait", "wait", "wait", "wait", "mask", "drop")),
        max_attempts=rng.choice((1, 2, 3)),
        checkpoint_every=rng.choice((1, 2, 3)),
        num_rows=rng.choice((2, 3, 5)),
        num_nodes=rng.choice((1, 2)),
        capacity=rng.choice((1, 2, 4)),
        max_messages=rng.choice((1000, 1000, 2 * in_flight, max(5, in_flight))),
        loses_payloads=rng.random() < 0.5,
        max_held=rng.choice((0, 2, 1000)),
    )
    config = config._replace(is_clustered=config.num_rows == 3 or config.steps == 5)
    config = config._replace(has_images=config.capacity == 2)
    # Not drawn: the runs of all other seeds stay what they were.
    config = config._replace(goes_back=config.max_attempts == 3)
    config = config._replace(is_paced=config.max_staleness == 2)
    if config.num_rows == 2 and config.loses_payloads:
        return config._replace(keep=0.5)
    return config._replace(num_tasks=2) if config.num_rows == 5 and config.loses_payloads else config


@dataclass(slots=True, eq=False)
class Thread:
    """One coroutine of a process."""

    process: Process
    coroutine: Coroutine[Pause, None, None]
    is_main: bool
    idle_at: int = -1
    """Number of the change after which it found nothing to do."""


@dataclass(slots=True, eq=False)
class Process:
    """One process of a role."""

    number: int
    role: str
    place: int
    """Which node it is; 0 otherwise."""
    bus: ModelBus
    threads: list[Thread] = field(default_factory=list)
    is_alive: bool = True
    is_stalled: bool = False
    """It stands still for a while: what it believes grows old."""
    state: Any = None
    """Whatever its coroutines share, for the faults that ask it for something."""

    def spawn(self, coroutine: Coroutine[Any, None, None], *, is_main: bool = False) -> None:
        self.threads.append(Thread(self, coroutine, is_main))

    def end(self) -> None:
        """Stop between two effects, as a kill does."""
        self.is_alive = False
        for thread in self.threads:
            thread.coroutine.close()
        self.threads.clear()


class World:
    """Everything there is."""

    def __init__(self, config: Config, *, seed: int, roles: Any) -> None:
        """``roles``: makes the coroutines of a process (``roles.Roles``)."""
        self.config = config
        self.random = random.Random(seed)
        self.mix = random.Random(seed)
        """Of what operators want of the tasks: its draws change nothing else."""
        self.old = random.Random(seed)
        """Of answers that are not up to date: its draws change nothing else, too."""
        self.is_fair = False
        """Nothing befalls it any more."""
        self.weights = [1] * config.num_tasks
        self.roles = roles
        self.broker = Broker(config.max_messages)
        self.oracle = Oracle(self)
        self.disk: dict[str, tuple[Any, Content]] = {}
        """Checkpoint folder -> its ledger, and what its weights were trained on."""
        self.now = 0.0
        self.num_effects = 0
        self.changes = 0
        self.armed: set[str] = set()
        self.processes: list[Process] = []
        self.num_processes = 0
        self.num_faults = 0
        self.num_effects_to_kill = 0
        """After so many effects of trainers one is killed; 0 for none: to have some die while they go back."""
        self.has_forgotten = False
        """The duplicate window has been over once."""
        self.revive()

    # being run

    @property
    def is_over(self) -> bool:
        """The controller has seen that every server holds the final weights, which are announced last of all."""
        return RUN_STATE in self.broker.keys

    def runnable(self) -> list[Thread]:
        changes = self.changes
        return [
            thread
            for process in self.processes
            if process.is_alive and not process.is_stalled
            for thread in process.threads
            if thread.idle_at != changes
        ]

    def step(self, thread: Thread) -> bool:
        """Let a coroutine go on to its next wait; say whether that was an effect."""
        process = thread.process
        self.num_effects += 1
        if process.role == "trainer" and self.num_effects_to_kill:
            self.num_effects_to_kill -= 1
            if not self.num_effects_to_kill:
                self.kill(process)
                return True
        try:
            pause = thread.coroutine.send(None)
        except StopIteration:
            if thread.is_main:
                process.end()
            else:
                process.threads.remove(thread)
            self.touch()
        except (FencedError, BusError):
            process.end()  # another has taken over; its supervisor may start it anew
            self.touch()
        else:
            if pause is Pause.IDLE:
                thread.idle_at = self.changes
                return False
        return True

    @property
    def clock_s(self) -> float:
        """What durations are measured by: an effect takes a second."""
        return self.now + self.num_effects

    @property
    def num_slow(self) -> int:
        """How many effects longer a group takes than at other times."""
        return SLOW if self.config.is_paced and self.num_effects // JUMP_EVERY % 2 else 0

    def touch(self) -> None:
        """Note a change: whoever is idle looks again."""
        self.changes += 1

    def has_fault(self, name: str) -> bool:
        """Say whether this befalls the operation that asks; once."""
        if name in self.armed:
            self.armed.remove(name)
            return True
        return False

    def old_reach(self, least: int, latest: int) -> int:
        """Return how far the state reaches that answers a read."""
        is_old = self.config.is_clustered and not self.is_fair and self.old.random() < OLD_SHARE
        self.oracle.seen["old answer"] += is_old
        return self.old.randint(min(least, latest), latest) if is_old else latest

    # what befalls it

    def start(self, role: str, place: int = 0) -> Process:
        self.num_processes += 1
        process = Process(self.num_processes, role, place, ModelBus(self, owner=self.num_processes))
        self.processes.append(process)
        process.spawn(self.roles.main(self, process), is_main=True)
        self.touch()
        return process

    def alive(self, role: str, place: int = 0) -> list[Process]:
        return [p for p in self.processes if p.is_alive and p.role == role and p.place == place]

    def missing(self) -> list[tuple[str, int]]:
        """Return the places that nobody fills."""
        places = [("node", place) for place in range(self.config.num_nodes)]
        places += [(role, 0) for role in ("controller", "trainer")]
        return [(role, place) for role, place in places if not self._is_filled(role, place)]

    def _is_filled(self, role: str, place: int) -> bool:
        if role == "trainer":
            newest = self.broker.keys.get(NAMES.weights_key(), (None, 0))[0]
            return bool(self.alive(role)) or (isinstance(newest, WeightsVersion) and newest.final)
        if role == "controller" and RUN_STATE in self.broker.keys:
            return True
        return bool(self.alive(role, place))

    def revive(self) -> None:
        for role, place in self.missing():
            self.start(role, place)

    def kill(self, process: Process) -> None:
        process.end()
        self.touch()

    def replace(self, process: Process) -> None:
        """Start another in its place, while it goes on: later, perhaps."""
        process.is_stalled = self.random.random() < STALLED_SHARE
        if len(self.alive(process.role, process.place)) <= MAX_ZOMBIES:
            self.start(process.role, process.place)

    def expire(self, sequence: int) -> None:
        """Let a lease run out: the ticket is given out again, whether its holder still works on it or not."""
        lease = self.broker.tickets.get(sequence)
        if lease is not None:
            lease.holder = None
            self.touch()

    def expire_dead(self) -> bool:
        """Let the leases of processes that are no more run out; say whether there were any."""
        alive = {process.number for process in self.processes if process.is_alive}
        dead = [one for one in self.broker.tickets.values() if one.holder is not None and one.holder not in alive]
        for lease in dead:
            self.expire(lease.sequence)
        return bool(dead)

    def fits(self, version: str, journal: Journal) -> bool:
        """Say whether the run may go on from a checkpoint."""
        ledger, _ = self.disk[f"checkpoints/{version}"]
        return journal.fits(Version.parse(version), ledger.trained.items())

    def order_rollback(self, rng: random.Random) -> None:
        """Have the run go on from an earlier checkpoint, unless it is about to end; the trainer may take long to go."""
        newest, _ = self.broker.keys.get(NAMES.weights_key(), (None, 0))
        journal = Journal()
        for entry in self.broker.log:
            if isinstance(entry.record, Cut):
                journal.add_cut(entry.record, sequence=entry.sequence)
            else:
                journal.add_outcome(entry.record)
        versions = [Version.parse(path.rpartition("/")[2]) for path in self.disk]
        there = [version for version in versions if self.fits(str(version), journal)]
        if there and isinstance(newest, WeightsVersion) and not newest.final:
            wanted = min(rng.choices(there, k=2), key=lambda one: one.step)
            order = Rollback(number=self.broker.rollback.number + 1, version=str(wanted))
            self.broker.write(ROLLBACK, order)
            self.touch()
            if rng.random() < ORDERED_AT_ONCE:
                self.carry_out_order()
                self.revive()
                self.num_effects_to_kill = rng.choice((0, rng.randint(12, 30)))

    def carry_out_order(self) -> None:
        """Kill the trainer where an order waits for the next one, as the launcher does."""
        if self.broker.rollback.is_due:
            for process in self.alive("trainer"):
                self.kill(process)

    def lose_payload(self, sequence: int) -> None:
        message = self.broker.delete_message(sequence)
        if message is not None:
            self.oracle.on_lost(message)
            self.touch()

    def forget_ids(self) -> None:
        """Let the duplicate window pass."""
        self.broker.known_ids.clear()
        self.has_forgotten = True

    def tick(self) -> None:
        """Let the deadline of every group that is waited for pass."""
        self.now += self.config.settings.rollout.group_deadline_s + 1
        self.touch()
