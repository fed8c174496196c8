"""The watchdog's word: each process stopped in turn, for as long as it takes until somebody is named."""

import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from areal_async.telemetry.wait_graph import BROKER, CONTROLLER, TRAINER, node, rank, server
from tools.faults_broker import broker_pid
from tools.faults_cases import Case, row
from tools.faults_run import ENDLESS, FaultFailed, FaultRun, send_signal

WATCHDOG_S = 4.0
STEPS_BETWEEN = 2
SERVER = "areal_async.inference.embedded"


@row("27", "each process stopped in turn, and named by the watchdog", is_quick=True)
def each_stopped(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS, run__watchdog_s=WATCHDOG_S, trainer__num_ranks=2)
    find: dict[str, Callable[[], int]] = {
        server("0-0"): lambda: run.pids(SERVER)[0],
        node("0"): lambda: run.role_pid("node"),
        TRAINER: lambda: _pid_of_rank(run, 0),
        rank(1): lambda: _pid_of_rank(run, 1),
        CONTROLLER: lambda: run.role_pid("controller"),
        BROKER: lambda: broker_pid(run),
    }
    run.start()
    run.wait_for_step(STEPS_BETWEEN)
    for culprit, find_pid in find.items():
        pid, at = find_pid(), datetime.now(UTC)
        send_signal(pid, signal.SIGSTOP)
        try:
            case.wait_named(culprit, since=at)
        finally:
            send_signal(pid, signal.SIGCONT)
        case.recovered(run.wait_for_progress())
        run.wait_for_step(len(run.steps) + STEPS_BETWEEN)
    case.check(not run.events("launcher", "process.died"), "a role ended because another was stopped")
    run.stop()


def _pid_of_rank(run: FaultRun, number: int) -> int:
    for pid in run.role_pids("trainer"):
        if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise FaultFailed(f"no trainer process of rank {number}: {run.last_words()}")
