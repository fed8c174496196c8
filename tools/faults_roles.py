"""Faults of the roles: killed at named points and at random, stopped and come back, started twice, all at once."""

import signal
import time
from typing import Any

from tools.faults_cases import Case, row
from tools.faults_run import FaultRun, strike

NODE_POINTS = ("node.before_publish", "node.after_publish", "node.before_ack", "node.after_ack", "node.paused")
TRAINER_POINTS = ("trainer.before_step", "trainer.after_step", "trainer.before_checkpoint", "trainer.during_checkpoint")
CHECKPOINT_POINTS = ("trainer.after_checkpoint", "trainer.before_acks", "trainer.after_acks", "trainer.after_announce")
CONTROLLER_POINTS = ("controller.before_tickets", "controller.before_cursor", "controller.after_cursor")
TRAINER_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def _run_past_points(case: Case, faults: list[tuple[str, int]], **settings: Any) -> FaultRun:
    """Run to the end with processes that are killed at these points; note the recovery from each."""
    run = case.new_run(faults=" ".join(f"{point}:{count}:kill" for point, count in faults), **settings)
    case.note("killed at " + ", ".join(f"{point} no. {count}" for point, count in faults))
    run.start()
    for point, _ in faults:
        run.wait_until(lambda point=point: run.has_fired(point) or not run.is_alive, f"{point} to strike")  # type: ignore[misc]
        if run.is_alive:
            case.recovered(run.wait_for_progress())
    run.finish()
    case.check(all(run.has_fired(point) for point, _ in faults), "a fault point was never reached")
    _check_steps(case, run)
    return run


def _check_steps(case: Case, run: FaultRun) -> None:
    steps = [line["step"] for line in run.steps]
    wanted = list(range(1, run.settings().run.steps + 1))
    case.check(steps == wanted, f"metrics.jsonl: got steps {steps}, need each of 1 to {wanted[-1]} once")


@row("5", "rollout node: kill -9 in mid batch, at a point and at random", is_random=True, is_quick=True)
def node_killed(case: Case) -> None:
    point = NODE_POINTS[(case.seed - 1) % len(NODE_POINTS)]
    count = 2 if point == "node.paused" else case.rng.randint(2, 20)
    run = case.new_run(faults=f"{point}:{count}:kill", run__steps=16)
    case.note(f"killed at {point} no. {count} and once at random")
    run.start()
    run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
    case.recovered(run.wait_for_progress())
    time.sleep(case.rng.uniform(0.0, 3.0))
    strike(run.role_pid("node"), signal.SIGKILL)
    case.recovered(run.wait_for_progress())
    run.finish()
    _check_steps(case, run)


@row("5c", "controller: kill -9 around tickets and cursor", is_random=True)
def controller_killed(case: Case) -> None:
    points = case.rng.sample(CONTROLLER_POINTS, 2)
    _run_past_points(case, [(point, case.rng.randint(2, 4)) for point in points])


@row("6", "trainer: kill -9 between step and checkpoint", is_random=True, is_quick=True)
def trainer_killed_before_checkpoint(case: Case) -> None:
    first = TRAINER_POINTS[case.seed % len(TRAINER_POINTS)]
    count = case.rng.randint(1, 2) if "checkpoint" in first else case.rng.randint(2, 8)
    _run_past_points(case, [(first, count)])


@row("7", "trainer: kill -9 between checkpoint and ack", is_random=True, is_quick=True)
def trainer_killed_before_acks(case: Case) -> None:
    point = CHECKPOINT_POINTS[(case.seed - 1) % len(CHECKPOINT_POINTS)]
    # the first settling of a lineage that starts is one with nothing to ack
    _run_past_points(case, [(point, case.rng.randint(2, 3))])


@row("24", "everything killed at once, and resumed", is_random=True, is_quick=True)
def everything_killed(case: Case) -> None:
    run = case.new_run(run__steps=16)
    for _ in range(2):
        run.start()
        before = len(run.steps)
        run.wait_until(lambda before=before: len(run.steps) > before + 1 or not run.is_alive, "two steps")  # type: ignore[misc]
        time.sleep(case.rng.uniform(0.0, 1.0))
        run.kill_everything()
    started = time.monotonic()
    run.start()
    run.wait_for_progress()
    case.recovered(time.monotonic() - started)
    run.finish()
    _check_steps(case, run)
