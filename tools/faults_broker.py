"""Faults of the broker: killed in a loop, asked to end, frozen; full streams and poison."""

import signal
import time
from datetime import datetime

from tools.faults_cases import Case, row
from tools.faults_run import ENDLESS, FaultRun, strike

NUM_KILLS = 10
FIRST_ACK_S = 2.0
FREEZE_S = 15.0
NOTICED_S = 8.0
"""Three pings and some; a connection pings every two seconds."""


def broker_pid(run: FaultRun) -> int:
    """Return the broker's process as it says itself."""
    return int((run.directory / "bus" / "nats.pid").read_text())


def _wait_broker_back(run: FaultRun, before: int) -> None:
    def is_back() -> bool:
        events = run.events("launcher", "broker.restarted")
        return bool(events) and events[-1]["pid"] not in (before, 0) and broker_pid(run) == events[-1]["pid"]

    run.wait_until(is_back, "the broker to be back", deadline_s=60)


@row("1", f"broker: {NUM_KILLS} x kill -9, 1 to 2 s apart", is_random=True, is_quick=True)
def broker_kill_loop(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS)
    run.start()
    run.wait_for_step(1)
    for _ in range(NUM_KILLS):
        time.sleep(case.rng.uniform(1.0, 2.0))
        pid = broker_pid(run)
        strike(pid, signal.SIGKILL)
        _wait_broker_back(run, pid)
        case.recovered(run.wait_for_progress())
    run.stop()


@row("2", "broker: SIGTERM and lame duck", is_quick=False)
def broker_asked_to_end(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS)
    run.start()
    run.wait_for_step(1)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2):
        time.sleep(1.0)
        pid = broker_pid(run)
        strike(pid, number)
        _wait_broker_back(run, pid)
        case.recovered(run.wait_for_progress())
    case.check(not run.events("launcher", "process.died"), "a role ended because the broker was asked to")
    run.stop()


@row("12", f"broker: SIGSTOP for {FREEZE_S:g} s", is_quick=False)
def broker_frozen(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS)
    run.start()
    run.wait_for_step(2)
    pid, at = broker_pid(run), datetime.now().astimezone()
    strike(pid, signal.SIGSTOP)
    time.sleep(FREEZE_S)
    strike(pid, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    for role in ("node", "trainer", "controller"):
        losses = [datetime.fromisoformat(event["timestamp"]) for event in run.events(role, "bus.disconnected")]
        noticed_s = [(loss - at).total_seconds() for loss in losses if loss > at]
        case.check(bool(noticed_s), f"{role} never noticed that the broker was frozen")
        case.check(noticed_s[0] < NOTICED_S, f"{role} noticed after {noticed_s[0]:.1f} s, need {NOTICED_S:g}")
    case.check(not run.events("launcher", "process.died"), "a role ended because the broker was frozen")
    run.stop()
