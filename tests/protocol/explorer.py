"""Explores runs at random: steps any process, lets any fault befall it, and sees that every run still ends.

One seed, one exploration: a violation is found again by its seed alone.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from areal_async.trainer.batch.cut import StreamRoom
from tests.protocol.oracle import Violation
from tests.protocol.roles import NodeModel, Roles
from tests.protocol.world import ARMED, Config, World, any_config

MAX_FAULTY_STEPS = 400
"""Steps of one run before faults are switched off and it must end."""
MAX_FAIR_STEPS = 6000
"""Steps within which a run must end from wherever it is, once nothing more befalls it."""


class Found(AssertionError):
    """A violation, and how to see it again."""

    def __init__(self, violation: Exception, *, seed: int, config: Config, num_steps: int) -> None:
        super().__init__(
            f"{type(violation).__name__}: {violation} (run seed {seed}, after {num_steps} steps, {config})"
        )
        self.promise = str(violation).partition(":")[0]


@dataclass
class Report:
    """What was explored."""

    num_steps: int = 0
    num_runs: int = 0
    num_faults: int = 0
    states: set[int] = field(default_factory=set)
    """Digests of the states that were met."""
    seen: Counter[str] = field(default_factory=Counter)
    duration_s: float = 0.0


FAULTS = {
    "kill": 6,
    "replace": 5,
    "expire": 4,
    "arm": 6,
    "fence": 3,
    "lose payload": 2,
    "stop": 1,
    "forget ids": 1,
    "tick": 2,
    "stall": 3,
    "wake": 4,
    "revive": 10,
}
"""How often each is tried; every run leaves some out and has more of others, so that rare meetings get their chance."""
REPAIRS = ("wake", "revive")
GO_BACK = "go back"
GO_BACK_WEIGHT = 20
"""As of ``FAULTS``, where a run does so."""


def befall(world: World, fault: str, rng: random.Random) -> None:
    """Let a fault happen, where there is something it can happen to."""
    alive = [process for process in world.processes if process.is_alive]
    match fault:
        case "kill" if alive:
            world.kill(rng.choice(alive))
        case "replace":  # a node's id is its own as long as it lives: its zombies are those whose leases ran out
            others = [process for process in alive if process.role != "node"]
            if others:
                world.replace(rng.choice(others))
        case "stall" if alive:
            rng.choice(alive).is_stalled = True
        case "wake":
            stalled = [process for process in alive if process.is_stalled]
            if stalled:
                rng.choice(stalled).is_stalled = False
        case "revive":
            world.revive()
        case "expire":
            held = [lease.sequence for lease in world.broker.tickets.values() if lease.holder is not None]
            if held:
                world.expire(rng.choice(held))
        case "arm":
            world.armed.add(rng.choice(ARMED))
        case "fence":
            nodes = [process.state for process in alive if isinstance(process.state, NodeModel)]
            if nodes:
                rng.choice(nodes).must_fence = True
                world.touch()
        case "lose payload" if world.config.loses_payloads:
            cut = world.oracle.cut_messages()
            if cut:
                world.lose_payload(rng.choice(cut))
        case "stop":
            for process in world.alive("trainer"):
                process.state.stop()
                world.touch()
        case "go back" if world.config.goes_back:
            world.order_rollback(rng)
        case "forget ids":
            world.forget_ids()
        case "tick":
            world.tick()
    world.num_faults += 1


def finish(world: World, rng: random.Random) -> int:
    """Switch faults off: the run must reach its end. Return how many steps that took.

    Raises:
        Violation: it stands still, or does not end.
    """
    world.armed.clear()
    world.is_fair = True
    for process in world.processes:
        process.is_stalled = False
    world.carry_out_order()
    num_steps = num_ticks = 0
    while not world.is_over:
        threads = world.runnable()
        rng.shuffle(threads)
        changes = world.changes
        for thread in threads:
            if thread.process.is_alive and thread.idle_at != world.changes:
                num_steps += world.step(thread)
        if num_steps > MAX_FAIR_STEPS:
            raise Violation(f"P6 no silent stop: the run goes on without coming to its end; {describe(world)}")
        if world.changes != changes:
            num_ticks = 0
        elif world.runnable():
            continue
        elif world.missing():
            world.revive()
        elif not world.expire_dead():
            num_ticks += 1
            world.tick()
            if num_ticks > 2:
                raise Violation(f"P6 no silent stop: nothing moves any more; {describe(world)}")
    world.oracle.check_end()
    return num_steps


def run_once(report: Report, *, seed: int, config: Config | None = None, max_steps: int) -> None:
    """Explore one run to its end.

    Raises:
        Found: a promise was broken.
    """
    rng = random.Random(seed)
    config = config or any_config(rng)
    world = World(config, seed=seed, roles=Roles())
    share = rng.choice((0.0, 0.02, 0.05, 0.1, 0.2))
    names = list(FAULTS)
    weights = [weight * rng.choice((0, 1, 1, 4)) if name not in REPAIRS else weight for name, weight in FAULTS.items()]
    if config.goes_back:
        names.append(GO_BACK)
        weights.append(GO_BACK_WEIGHT)
    burst = rng.choice((1, 1, 4, 16))  # steps of one process before another's turn
    num_steps = 0
    try:
        while num_steps < max_steps and world.num_faults < max_steps and not world.is_over:
            threads = world.runnable()
            if not threads or rng.random() < share:
                befall(world, "revive" if not threads and world.missing() else rng.choices(names, weights)[0], rng)
            else:
                changes = world.changes
                thread = rng.choice(threads)
                for _ in range(rng.randint(1, burst)):
                    num_steps += world.step(thread)
                    if thread not in thread.process.threads or thread.idle_at == world.changes:
                        break
                if world.changes != changes:
                    report.states.add(digest(world))
        num_steps += finish(world, rng)
    except Exception as exc:  # whatever the rules raise is a finding: told with its seed
        raise Found(exc, seed=seed, config=config, num_steps=num_steps) from exc
    finally:
        for process in world.processes:
            process.end()
    report.num_runs += 1
    report.num_steps += num_steps
    report.num_faults += world.num_faults
    report.seen.update(world.oracle.seen)


def explore(*, num_steps: int, seed: int, config: Config | None = None) -> Report:
    """Explore runs until so many steps are made; under drawn settings, unless some are given.

    Raises:
        Found: the first violation.
    """
    report, started = Report(), time.perf_counter()
    while report.num_steps < num_steps:
        run_once(report, seed=seed + report.num_runs, config=config, max_steps=MAX_FAULTY_STEPS)
    report.duration_s = time.perf_counter() - started
    return report


def digest(world: World) -> int:
    """Condense what is stored and how far everybody is."""
    broker = world.broker
    last = broker.log[-1].record if broker.log else None
    return hash(
        (
            world.config,
            len(broker.log),
            last and (last.kind, last.lineage, last.step),
            tuple([(lease.ticket.group_id, lease.holder is None) for lease in broker.tickets.values()]),
            tuple([(message.group_id, len(message.slots)) for message in broker.trajectories.values()]),
            tuple([(process.role, len(process.threads)) for process in world.processes if process.is_alive]),
        )
    )


def describe(world: World) -> str:
    """Say who is there and what is stored, for a run that stands still."""
    broker = world.broker
    trainers = [
        f"trainer {process.number}: step {process.state.step}, "
        f"{process.state.planner.decide(now=world.now, room=StreamRoom.AMPLE) if process.state.planner else 'starting'}"
        for process in world.alive("trainer")
    ]
    controllers = [
        f"controller {process.number}: {process.state.accounts.num_credits} credits, held {process.state.accounts.held}"
        for process in world.alive("controller")
    ]
    stored = f"{len(broker.tickets)} tickets, {len(broker.trajectories)} messages"
    return "; ".join([*trainers, *controllers, stored])
