"""Faults while a run changes which of its versions holds: as it goes back, and as its gate promotes one."""

import json
import signal
from typing import Any

from areal_async.versions import tags
from tools.faults_broker import broker_pid, wait_broker_back
from tools.faults_cases import Case, row
from tools.faults_run import HELD, FaultFailed, FaultRun, send_signal

ROLLBACK_POINTS = ("trainer.before_branch", "trainer.before_rollback_ends")
ORDERED = "controller.after_rollback_order"
GATE_POINTS = ("controller.before_comparison", "controller.after_comparison", "controller.after_tag")


@row("6d", "rollback of a live run: its trainer, and the next one, kill -9 as they go back", is_random=True)
def trainer_killed_as_it_goes_back(case: Case) -> None:
    held = case.rng.randint(8, 11)  # a checkpoint of step 6 is there, or about to be
    kills = " ".join(f"{point}:1:kill" for point in ROLLBACK_POINTS)
    run = case.new_run(faults=f"{HELD}:{held}:stop {kills}", trainer__keep_checkpoints=100, run__steps=16)
    run.start()
    run.wait_held()
    run.order("rollback", "--to", "3")
    case.note(f"at step {held}")
    case.recovered(run.wait_until(lambda: _goes_on_from(run, 3) or not run.is_alive, "the lineage that went back"))
    run.finish()
    case.check(all(run.has_fired(point) for point in ROLLBACK_POINTS), "a fault point was never reached")
    case.check_steps()


@row("6e", "rollback of a live run: controller kill -9 at the order and in its midst, broker before it", is_random=True)
def others_killed_as_a_run_goes_back(case: Case) -> None:
    held = case.rng.randint(8, 11)
    stops = " ".join(f"{point}:1:stop" for point in ROLLBACK_POINTS)
    run = case.new_run(
        faults=f"{HELD}:{held}:stop {ORDERED}:1:kill {stops}", trainer__keep_checkpoints=100, run__steps=16
    )
    run.start()
    run.wait_held()
    try:
        run.order("rollback", "--to", "3")
    except FaultFailed as exc:  # nobody is left to answer: the order holds all the same
        case.note(f"at step {held}; {exc}")
    case.check(run.has_fired(ORDERED), f"{ORDERED} was never reached: the order did not come so far")
    for point in ROLLBACK_POINTS:
        run.wait_until(lambda point=point: run.has_fired(point) or not run.is_alive, f"{point} to strike")  # type: ignore[misc]
        pid = broker_pid(run)
        if point == ROLLBACK_POINTS[0]:
            send_signal(pid, signal.SIGKILL)
            wait_broker_back(run, pid)
        else:
            send_signal(run.role_pid("controller"), signal.SIGKILL)
        send_signal(run.role_pid("trainer"), signal.SIGCONT)
    case.recovered(run.wait_until(lambda: _goes_on_from(run, 3) or not run.is_alive, "the lineage that went back"))
    run.finish()
    case.check_steps()


def _goes_on_from(run: FaultRun, step: int) -> bool:
    """Say whether another lineage than the first has trained the next step."""
    lines = run.steps
    return len(lines) > step and not lines[step]["weights_version"].startswith("1-")


@row("5d", "promotion by the gate: controller kill -9 around comparison and tag, broker between", is_random=True)
def killed_as_a_version_is_promoted(case: Case) -> None:
    kills = " ".join(f"{point}:{case.rng.randint(1, 2)}:kill" for point in GATE_POINTS)
    held_out: dict[str, Any] = {
        "eval__dataset": json.dumps({"path": "configs/data/gsm8k_tiny_test.jsonl"}),
        "eval__limit": 8,
    }
    run = case.new_run(
        faults=kills, eval__every_steps=3, gate__action="promote", gate__at_least=-1, trainer__keep_checkpoints=2,
        run__steps=24, **held_out,
    )  # fmt: skip
    case.note(f"killed at {kills}")
    run.start()
    run.wait_until(lambda: run.has_fired(GATE_POINTS[1]) or not run.is_alive, f"{GATE_POINTS[1]} to strike")
    pid = broker_pid(run)
    send_signal(pid, signal.SIGKILL)
    wait_broker_back(run, pid)
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check(all(run.has_fired(point) for point in GATE_POINTS), "a fault point was never reached")
    promoted = [line.version for line in tags.history(run.directory)]
    case.check(len(set(promoted)) == len(promoted) >= 2, f"the gate promoted {promoted}, need several, each once")
    case.check_steps()
