"""What a second node is worth: rollouts per second of one run with one node, with two, and after one was killed.

    python -m tools.bench_nodes                # about three minutes
    python -m tools.bench_nodes --window-s 60

The run is the real program (`python -m areal_async run`), bound by generation: its servers sleep for each token
(`tools/sleeping_server.py`), so that nodes do not share a processor as those of different hosts would not. The second
node joins as a user would have it join, `node --join`, and is ended with SIGKILL, its keeper first, so that nobody is
left to say farewell. Counted is what the broker acknowledged. Then the run is stopped, and the doctor says whether
anything was lost or trained twice. Exits with 1 unless the second node raises the rate by at least `--need`.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_async.protocol.publish_log import read_receipts
from tools.faults_counts import count_slots
from tools.faults_run import ENDLESS, REPOSITORY, FaultRun, send_signal
from tools.sleeping_server import TOKEN_S, interpreter

NEED = 1.8
SECONDS_PER_TOKEN = 0.1
REQUESTS_PER_SERVER = 16
NODE_ID = "second"
SETTLE_S = 10.0
"""Time until the groups that one node alone had leased are through."""
BOUND_BY_GENERATION = {
    "run__steps": ENDLESS,
    "inference__backend": "sglang",
    "inference__max_running_requests": REQUESTS_PER_SERVER,
    "rollout__group_size": 4,
    "rollout__min_group_size": 4,
    "rollout__batch_groups": 12,
    "rollout__max_trajectories_per_node": REQUESTS_PER_SERVER,
    "trainer__lr": 1e-7,
    "run__watchdog_s": 120,
}


def sleeping_run(folder: Path, **settings: Any) -> FaultRun:
    """Return a run whose servers sleep."""
    environment = {TOKEN_S: str(SECONDS_PER_TOKEN)}
    chosen: dict[str, Any] = {**BOUND_BY_GENERATION, "inference__python": interpreter(folder), **settings}
    return FaultRun(folder, workflow="tools/heavy_tail.py:same_length", environment=environment, **chosen)


def join(run: FaultRun, *words: str) -> "subprocess.Popen[bytes]":
    """Have one more node join a run."""
    command = [sys.executable, "-m", "areal_async", "node", "--join", run.run_directory.read_bus_url()]
    command += ["--run", run.directory.name, "--directory", str(run.directory.parent), "--node-id", NODE_ID, *words]
    with open(run.directory.parent / "node.out", "ab") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=run.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def num_rollouts(run: FaultRun, node_id: str = "") -> int:
    """Return the acknowledged trajectories, of one node or of all."""
    produced = read_receipts(run.directory)
    return sum(
        len(receipt.slots)
        for producer, one in produced.items()
        if producer.startswith(f"{node_id}." if node_id else "")
        for receipt in one.receipts
    )


def rate(run: FaultRun, what: str, *, window_s: float) -> float:
    """Measure and print rollouts per second, and how much of the time the trainer had nothing to train."""
    started, before, num_steps = time.monotonic(), num_rollouts(run), len(run.steps)
    time.sleep(window_s)
    per_s = (num_rollouts(run) - before) / (time.monotonic() - started)
    steps = run.steps[num_steps:]
    whole_s = sum(line["time_step_s"] for line in steps)
    idle = sum(line["time_wait_data_s"] for line in steps) / whole_s if whole_s else 0.0
    print(f"{what:<28}{per_s:6.2f} rollouts/s; the trainer waited {idle:.0%} of the time", flush=True)
    return per_s


def measure(folder: Path, *, window_s: float) -> float:
    """Carry it out; return how many times the rate of one node two nodes have."""
    run = sleeping_run(folder)
    try:
        run.start()
        run.wait_for_step(2)
        alone = rate(run, "one node", window_s=window_s)
        keeper = join(run)
        run.wait_until(lambda: num_rollouts(run, NODE_ID) > REQUESTS_PER_SERVER, "rollouts of the second node")
        time.sleep(SETTLE_S)
        both = rate(run, "two nodes", window_s=window_s)
        send_signal(keeper.pid, signal.SIGKILL)
        keeper.wait()
        run.wait_until(lambda: len(run.role_pids("node")) == 1, "the death of the second node", deadline_s=10)
        started, num_steps = time.monotonic(), len(run.steps)
        run.wait_until(lambda: bool(run.events("controller", "server.disowned")), "the controller to miss it")
        print(f"missed after {time.monotonic() - started:.0f} s; {len(run.steps) - num_steps} steps meanwhile")
        run.wait_for_step(len(run.steps) + 3)
        rate(run, "after SIGKILL of the second", window_s=window_s)
        run.stop()
        found = count_slots(run.run_directory)
    finally:
        run.kill_everything()
        run.close()
    print(
        f"{found.acked} trajectories acknowledged, {found.trained} trained, {found.stored} stored: "
        f"lost {len(found.lost)}, twice {len(found.twice)}, over age {len(found.over_age)}, other {found.broken}"
    )
    if found.lost or found.twice or found.over_age or found.broken:
        sys.exit("a promise is broken")
    return both / alone


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-s", type=float, default=30.0)
    parser.add_argument("--need", type=float, default=NEED)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratio = measure(Path(folder), window_s=arguments.window_s)
    print(f"two nodes / one node = {ratio:.2f}, need at least {arguments.need:g}")
    sys.exit(0 if ratio >= arguments.need else 1)


if __name__ == "__main__":
    main()
