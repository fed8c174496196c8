"""Faults of the wire: a proxy before an external broker loses answers, acks and events, and parts everybody."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from areal_async.protocol.types import Version
from areal_async.telemetry.wait_graph import BROKER
from tools.faults_cases import Case, row
from tools.faults_proxy import ANY_ROLE, Direction, Proxy, Treatment
from tools.faults_run import ENDLESS, FaultRun, send_signal
from tools.faults_server import running_server

BOTH = tuple(Direction)
PARTITION_S = 20.0
WATCHDOG_S = 8.0
RESUMED_S = 5.0
LATEST_VERSION_S = 5.0
LOST_S = 2.0


@contextmanager
def run_behind_proxy(case: Case, **settings: Any) -> Iterator[tuple[FaultRun, Proxy]]:
    """Start an endless run whose every process reaches its broker through a proxy; account for it at the end."""
    with running_server(case.directory / "broker") as port, Proxy(port) as proxy:
        run = case.new_run(**{"run__steps": ENDLESS, "bus__url": proxy.url, **settings})
        run.start()
        run.wait_for_step(1)
        yield run, proxy
        proxy.heal()
        run.stop()
        case.count_slots()


@row("8", "stored, and the answer lost", is_random=True, is_quick=True)
def answer_lost(case: Case) -> None:
    with run_behind_proxy(case) as (run, proxy):
        for _ in range(3):
            time.sleep(case.rng.uniform(0.2, 1.5))
            proxy.inject_at_publish("node", Direction.TO_CLIENT, Treatment.LOSE)
            run.wait_until(lambda: proxy.is_treating or not run.is_alive, "a publish whose answer is lost")
            time.sleep(LOST_S)
            proxy.heal()
            case.recovered(run.wait_for_progress())
        repeated = sum(count > 1 for count in proxy.message_ids.values())
        case.check(repeated > 0, "no publish was repeated: the fault did not strike")
        case.note(f"{repeated} publishes repeated")


@row("9", "acks lost, and the trainer killed", is_random=True)
def acks_lost(case: Case) -> None:
    with run_behind_proxy(case) as (run, proxy):
        for _ in range(2):
            time.sleep(case.rng.uniform(0.2, 1.5))
            proxy.inject(["trainer"], [Direction.TO_BROKER], Treatment.LOSE)
            time.sleep(LOST_S)
            send_signal(run.role_pid("trainer"), signal.SIGKILL)
            proxy.heal()
            steps = len(run.steps)
            case.recovered(run.wait_until(lambda steps=steps: len(run.steps) > steps, "a step"))  # type: ignore[misc]


@row("10", f"partition for {PARTITION_S:g} s: silent, lossy, half-open", is_alone=True)
def partition(case: Case) -> None:
    with run_behind_proxy(case, run__watchdog_s=WATCHDOG_S) as (run, proxy):
        for treatment in (Treatment.HOLD, Treatment.LOSE):
            at = datetime.now(UTC)
            proxy.inject([ANY_ROLE], BOTH, treatment)
            time.sleep(PARTITION_S / 2)
            if treatment is Treatment.LOSE:
                time.sleep(PARTITION_S / 2)
            case.wait_named(BROKER, since=at)
            _check_resumed(case, run, proxy)
        proxy.cut(half_open=True)
        _check_resumed(case, run, proxy, heals=False)
        case.check(not run.events("launcher", "process.died"), "a role ended because of the partition")


def _check_resumed(case: Case, run: FaultRun, proxy: Proxy, *, heals: bool = True) -> None:
    if heals:
        proxy.heal()
    seconds = run.wait_for_progress()
    case.recovered(seconds)
    allowed = RESUMED_S if heals else 3 * RESUMED_S  # half-open is noticed by pings first
    case.check(seconds < allowed, f"resumed {seconds:.1f} s after the heal, need {allowed:g}")


@row("20", "events of new weights lost, then late and out of order; connections cut, a server killed", is_alone=True)
def events_lost(case: Case) -> None:
    with run_behind_proxy(case) as (run, proxy):
        for delay_s in (None, 3.0):
            proxy.inject_messages("node", r"\.weights|\$KV\.", delay_s=delay_s)
            steps = len(run.steps)
            run.wait_for_step(steps + 4)
            proxy.heal()
        case.check(proxy.num_frames_hit > 0, "no event was struck")
        case.note(f"{proxy.num_frames_hit} events struck")
        _check_swaps(case, run)
        proxy.cut()
        for pid in run.pids("areal_async.inference.embedded"):
            send_signal(pid, signal.SIGKILL)
        case.recovered(run.wait_for_progress())
        run.wait_for_step(len(run.steps) + 2)


def _check_swaps(case: Case, run: FaultRun) -> None:
    """Every announced version that lasted reached the server soon, and none was followed by an older one."""
    swaps = run.events("node", "server.swapped")
    versions = [Version.parse(event["version"]) for event in swaps]
    case.check(versions == sorted(versions), f"the server went back: {versions}")
    at = [datetime.fromisoformat(event["timestamp"]) for event in swaps]
    announced = {
        Version.parse(event["weights_version"]): datetime.fromisoformat(event["timestamp"])
        for event in run.events("trainer", "step.trained")
    }
    late_s = [
        (when - announced[version]).total_seconds()
        for version, when in zip(versions, at, strict=True)
        if version in announced
    ]
    case.check(max(late_s, default=0.0) < LATEST_VERSION_S, f"a version came {max(late_s):.1f} s late")
