"""Faults of the roles: killed at named points and at random, stopped and come back, started twice, all at once."""

import signal
import subprocess
import time
from datetime import UTC, datetime
from typing import Any

from areal_async.config.settings import TICKET_ACK_WAIT_S
from areal_async.process.host import free_port
from areal_async.telemetry.wait_graph import TRAINER, node
from tools.faults_cases import Case, row
from tools.faults_run import ENDLESS, HELD, REPOSITORY, FaultRun, send_signal

NODE_POINTS = ("node.before_publish", "node.after_publish", "node.before_ack", "node.after_ack", "node.paused")
TRAINER_POINTS = ("trainer.before_step", "trainer.after_step", "trainer.before_checkpoint", "trainer.during_checkpoint")
CHECKPOINT_POINTS = ("trainer.after_checkpoint", "trainer.before_acks", "trainer.after_acks", "trainer.after_announce")
CONTROLLER_POINTS = ("controller.before_tickets", "controller.before_cursor", "controller.after_cursor")
SLOW_S = 25.0
STALL_S = 5.0
LEASE_WATCHDOG_S = 10.0
"""Watchdog deadline above the stall, which is to be survived, and below the leases of a frozen node."""
WATCHDOG_S = 5.0
"""Watchdog deadline of rows that stop one process, shorter than every other deadline for it."""
ALL_STOPPED_S = 40.0
WIDE_STEPS = 14
"""Steps beyond the staleness bound: some groups come due while the stream is full."""
MAX_WAIT_S = 30.0
WIDE = '''"""Long prompts, so that trajectories are large."""


async def wide(prompt, policy):
    reply = await policy.complete([5 + (7 * place) % 90 for place in range(440)], max_new_tokens=8)
    return float(len(reply.text) % 2)
'''
STALLING = '''"""Blocks the event loop once."""
import pathlib
import time

from areal_async import Policy, Prompt

MARK = pathlib.Path("{mark}")


async def stalling(prompt: Prompt, policy: Policy) -> float:
    reply = await policy.chat([{{"role": "user", "content": prompt["question"]}}])
    if not MARK.exists():
        MARK.touch()
        time.sleep({seconds})
    return float(len(reply.text) % 2)
'''
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
    case.check_steps()
    return run


@row("5", "rollout node: kill -9 in mid batch, at a point and at random", is_random=True, is_quick=True)
def node_killed(case: Case) -> None:
    point = NODE_POINTS[(case.seed - 1) % len(NODE_POINTS)]
    count = 2 if point == "node.paused" else case.rng.randint(2, 20)
    # The trainer waits for the second kill: the run is in its middle then, however late that comes.
    run = case.new_run(faults=f"{point}:{count}:kill {HELD}:12:stop", run__steps=16)
    case.note(f"killed at {point} no. {count} and once at random")
    run.start()
    run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
    before = run.num_acknowledged  # a step that is trained meanwhile is no sign of the node
    case.recovered(run.wait_until(lambda: run.num_acknowledged > before or not run.is_alive, "the node's next work"))
    time.sleep(case.rng.uniform(0.0, 3.0))
    send_signal(run.role_pid("node"), signal.SIGKILL)
    send_signal(run.wait_held(), signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check_steps()


@row("5c", "controller: kill -9 around tickets and cursor", is_random=True)
def controller_killed(case: Case) -> None:
    points = case.rng.sample(CONTROLLER_POINTS, 2)
    _run_past_points(case, [(point, case.rng.randint(2, 4)) for point in points])


@row("6", "trainer: kill -9 between step and checkpoint", is_random=True)
def trainer_killed_before_checkpoint(case: Case) -> None:
    first = TRAINER_POINTS[case.seed % len(TRAINER_POINTS)]
    count = case.rng.randint(1, 2) if "checkpoint" in first else case.rng.randint(2, 8)
    _run_past_points(case, [(first, count)])


@row("7", "trainer: kill -9 between checkpoint and ack", is_random=True)
def trainer_killed_before_acks(case: Case) -> None:
    point = CHECKPOINT_POINTS[(case.seed - 1) % len(CHECKPOINT_POINTS)]
    # the first settling of a lineage that starts is one with nothing to ack
    _run_past_points(case, [(point, case.rng.randint(2, 3))])


@row(
    "6c", "turns on one GPU: the trainer killed in its turn, then a server while its memory is released", is_random=True
)
def turn_broken(case: Case) -> None:
    stop = case.rng.randint(3, 5)
    run = case.new_run(
        faults=f"trainer.has_cards:2:kill trainer.before_step:{stop}:stop", run__steps=16, inference__colocate="release"
    )
    run.start()
    run.wait_until(lambda: run.has_fired("trainer.has_cards") or not run.is_alive, "the trainer to be killed")
    case.recovered(run.wait_for_progress())
    run.wait_until(lambda: run.has_fired("trainer.before_step") or not run.is_alive, "the trainer to be stopped")
    case.note(f"killed in turn no. 2; a server killed in the next trainer's turn no. {stop}")
    num_failed = len(run.events("node-0", "server.failed"))
    for server in run.pids("areal_async.inference.embedded"):
        send_signal(server, signal.SIGKILL)
    run.wait_until(lambda: len(run.events("node-0", "server.failed")) > num_failed, "the server to be missed")
    case.check(not run.pids("areal_async.inference.embedded"), "a server was started in the trainer's turn")
    send_signal(run.role_pid("trainer"), signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check_steps()


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
    case.check_steps()


@row("11", "trainer: SIGSTOP, another takes over, and the zombie comes back", is_random=True, is_quick=True)
def trainer_zombie(case: Case) -> None:
    point = ("trainer.after_step", "trainer.before_checkpoint", "trainer.before_acks", "trainer.before_announce")[
        case.seed % 4
    ]
    run = case.new_run(faults=f"{point}:3:stop", run__steps=24, run__watchdog_s=WATCHDOG_S)
    case.note(f"stopped at {point} no. 3")
    run.start()
    run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
    case.wait_named(TRAINER, since=datetime.now(UTC))
    zombie, steps = run.role_pid("trainer"), len(run.steps)
    second = run.start_role("trainer", environment={**TRAINER_RANK, "MASTER_PORT": str(free_port())})
    try:
        case.recovered(run.wait_until(lambda: len(run.steps) > steps + 1, "two steps of the second trainer"))
        # It would be at the end within seconds, and the zombie at its own only after some.
        send_signal(second.pid, signal.SIGSTOP)
        run.order("pause")
        send_signal(second.pid, signal.SIGCONT)
        send_signal(zombie, signal.SIGCONT)
        run.wait_until(
            lambda: any(event["process"].startswith("trainer") for event in run.events("launcher", "process.died")),
            "the zombie to be fenced",
        )
        run.order("resume")
        run.finish()
    finally:
        second.kill()
        second.wait()
    case.check_steps()


@row("13", f"slow trainer: stopped nine tenths of {SLOW_S:g} s; the stream full")
def trainer_slow(case: Case) -> None:
    run = _wide_run(case)
    run.start()
    run.wait_for_step(1)
    trainer, ends_at = run.role_pid("trainer"), time.monotonic() + SLOW_S
    while time.monotonic() < ends_at:
        send_signal(trainer, signal.SIGSTOP)
        time.sleep(0.9)
        send_signal(trainer, signal.SIGCONT)
        time.sleep(0.1)
    case.check(bool(run.events("node", "stream.full")), "the stream never filled")
    case.recovered(run.wait_for_progress())
    run.stop()


@row("15", "stream full, then drained")
def stream_full(case: Case) -> None:
    run = _wide_run(case)
    run.start()
    run.wait_for_step(1)
    trainer, at = run.role_pid("trainer"), datetime.now(UTC)
    send_signal(trainer, signal.SIGSTOP)
    run.wait_until(lambda: bool(run.events("node", "stream.full")), "the stream to fill")
    case.wait_named(TRAINER, since=at)
    send_signal(trainer, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.wait_for_step(len(run.steps) + WIDE_STEPS)
    waited_s = max(line["time_wait_data_s"] for line in run.steps[-WIDE_STEPS:])
    case.check(waited_s < MAX_WAIT_S, f"a step waited {waited_s:.0f} s for data, need {MAX_WAIT_S:g}")
    run.stop()


def _wide_run(case: Case) -> FaultRun:
    """Return a run whose admitted trajectories together are larger than its stream may be."""
    workflow = case.directory / "wide.py"
    workflow.write_text(WIDE)
    return case.new_run(
        workflow=str(workflow), run__steps=ENDLESS, rollout__group_size=4, rollout__min_group_size=2,
        rollout__max_staleness=11, rollout__max_trajectory_bytes=1 << 16, rollout__max_stream_bytes=1 << 20,
        run__watchdog_s=WATCHDOG_S,
    )  # fmt: skip


@row("21", "the same run started twice: launcher, controller, node and trainer")
def started_twice(case: Case) -> None:
    run = case.new_run(run__steps=16)
    run.start()
    run.wait_for_step(2)
    second = subprocess.run(
        run.command, cwd=REPOSITORY, env=run.environment, capture_output=True, text=True, timeout=60, check=False
    )
    case.check(second.returncode == 2, f"a second launcher got status {second.returncode}, need 2")
    case.check("already running" in second.stdout + second.stderr, "the second launcher does not say why")
    others = [
        run.start_role("controller"),
        run.start_role("node", "--node-id", "1"),
        run.start_role("trainer", environment={**TRAINER_RANK, "MASTER_PORT": str(free_port())}),
    ]
    try:
        run.finish()
    finally:
        for other in others:
            other.kill()
            other.wait()
    case.check_steps()


@row("23", f"event loop stalled for {STALL_S:g} s by a workflow, a node frozen past its leases")
def loop_stalled(case: Case) -> None:
    workflow = case.directory / "stalling.py"
    workflow.write_text(STALLING.format(seconds=STALL_S, mark=case.directory / "stalled"))
    run = case.new_run(workflow=str(workflow), run__steps=ENDLESS, run__watchdog_s=LEASE_WATCHDOG_S)
    run.start()
    run.wait_for_step(1)
    run.wait_until(lambda: bool(run.events("node", "loop.blocked")), "the stall to be noticed")
    case.recovered(run.wait_for_progress())
    first = run.role_pid("node")
    second = run.start_role("node", "--node-id", "1")
    try:
        run.wait_until(lambda: len(run.events("node", "server.swapped")) > 0, "the second node")
        at, ends_at = datetime.now(UTC), time.monotonic() + TICKET_ACK_WAIT_S + 5.0
        send_signal(first, signal.SIGSTOP)
        case.wait_named(node("0"), since=at)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        send_signal(first, signal.SIGCONT)
        case.recovered(run.wait_for_progress())
        run.wait_for_step(len(run.steps) + 3)
        run.stop()
    finally:
        second.terminate()
        second.wait()


@row("26", f"every process stopped for {ALL_STOPPED_S:g} s, and continued", is_random=True)
def everything_stopped(case: Case) -> None:
    run = case.new_run(run__steps=16, run__watchdog_s=20)
    run.start()
    run.wait_for_step(case.rng.randint(1, 4))
    time.sleep(case.rng.uniform(0.0, 1.0))
    pids, at = run.all_pids(), datetime.now(UTC)
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)
    time.sleep(ALL_STOPPED_S)
    case.rng.shuffle(pids)  # they come back in any order
    for pid in pids:
        send_signal(pid, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check_nobody_named(since=at)
    case.check_steps()
