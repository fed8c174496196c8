"""Faults of weights on their way by broadcast: who receives or sends them is killed when some buckets are through."""

import signal
import time

from tools.faults_cases import Case, row
from tools.faults_run import send_signal

POINT = "trainer.during_broadcast"
BUCKET_BYTES, NUM_BUCKETS = 300_000, 14
"""Number of buckets in a version of the tiny model's 3.4 MB in float32."""
NUM_LEFT = 6
"""Buckets of a version that are yet to be sent when its receiver is killed: the last ones may be with it already."""
DEADLINE_S = 20
RECEIVED_S = 0.3
"""Time for bytes that were sent before the stop to arrive."""
SERVER = "areal_async.inference.embedded"


@row("28", "broadcast of weights: a server killed in mid broadcast, then the trainer", is_random=True, is_quick=True)
def broadcast_broken(case: Case) -> None:
    first = case.rng.randint(0, 2) * NUM_BUCKETS + case.rng.randint(1, NUM_BUCKETS - NUM_LEFT)
    second = first + case.rng.randint(10, 60)
    run = case.new_run(
        faults=f"{POINT}:{first}:stop {POINT}:{second}:kill", run__steps=24, inference__num_servers=2,
        inference__weight_transfer="distributed", inference__bucket_bytes=BUCKET_BYTES,
        inference__transfer_deadline_s=DEADLINE_S,
    )  # fmt: skip
    case.note(f"at buckets {first} and {second}")
    run.start()
    run.wait_until(lambda: run.has_fired(f"{POINT}-{first}") or not run.is_alive, "the first broadcast to be struck")
    trainer = run.role_pid("trainer")
    time.sleep(RECEIVED_S)
    send_signal(case.rng.choice(sorted(run.pids(SERVER))), signal.SIGKILL)
    run.wait_until(lambda: bool(run.events("node", "server.failed")), "the node to miss its server", deadline_s=30)
    send_signal(trainer, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.wait_until(lambda: run.has_fired(f"{POINT}-{second}") or not run.is_alive, "the second broadcast to be struck")
    num_before = len(run.events("trainer", "weights.broadcast"))
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check(run.has_fired(f"{POINT}-{second}"), "the trainer was never killed in a broadcast")
    case.check(bool(run.events("trainer", "broadcast.failed")), "the server's end broke no broadcast")
    sent = [one["is_whole"] for one in run.events("trainer", "weights.broadcast")]
    case.check(any(sent[num_before:]), "no broadcast came through any more after the faults")
    case.note(f"{sum(sent)} of {len(sent)} broadcasts whole")
    case.check_steps()


@row(
    "33", "broadcast of weights: the trainer and the only server killed, the newest version on no disk", is_random=True
)
def newest_on_no_disk(case: Case) -> None:
    run = case.new_run(
        run__steps=14, trainer__checkpoint_every_steps=6, inference__num_servers=1,
        inference__weight_transfer="distributed", inference__bucket_bytes=BUCKET_BYTES, inference__disk_every=100,
        inference__transfer_deadline_s=DEADLINE_S,
    )  # fmt: skip
    run.start()
    run.wait_for_step(case.rng.randint(7, 10))
    trainer = run.role_pid("trainer")
    send_signal(trainer, signal.SIGSTOP)
    announced = run.events("node", "weights.announced")[-1]["version"]
    is_lost = not (run.directory / "weights" / announced).exists()
    case.note(f"killed at {announced}")
    for server in run.pids(SERVER):
        send_signal(server, signal.SIGKILL)
    send_signal(trainer, signal.SIGKILL)
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check(is_lost, f"version {announced} was on disk")
    case.check_steps()
