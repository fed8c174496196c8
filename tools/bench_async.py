"""What asynchrony is worth: wall clock per trained token, synchronous over asynchronous, same work in one run.

    python -m tools.bench_async                     # both workloads; about ten minutes on 2 cores
    python -m tools.bench_async --workload cpu --rounds 3

Both sides are the real program (`python -m areal_async run`): broker, node, server, trainer. Synchronous is
`max_staleness 0` with one and with two threads per process, the better of which counts: on 2 cores its server and
its trainer take turns, so either may use both. Asynchronous is `max_staleness 2` with one thread per process.
`cpu` is bound by computing; in `tool` each trajectory waits for a slow tool first. Lengths are heavy-tailed.
The sides alternate over the rounds; per side the median round counts. Steps before WARM_UP_STEPS are left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

WARM_UP_STEPS: Final = 3
WORKFLOWS: Final = {"cpu": "tools/heavy_tail.py:heavy_tail", "tool": "tools/heavy_tail.py:slow_tool"}
SIDES: Final = {
    "synchronous, 1 thread": {"rollout.max_staleness": 0, "trainer.num_threads": 1, "inference.num_threads": 1},
    "synchronous, 2 threads": {"rollout.max_staleness": 0, "trainer.num_threads": 2, "inference.num_threads": 2},
    "asynchronous": {"rollout.max_staleness": 2, "trainer.num_threads": 1, "inference.num_threads": 1},
}
REFERENCES: Final = ("synchronous, 1 thread", "synchronous, 2 threads")


def seconds_per_token(workload: str, side: str, *, steps: int, batch_groups: int) -> float:
    """Run one side once; return wall-clock seconds per trained token, from the end of the warm-up on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "areal_async", "run", WORKFLOWS[workload]]
        settings = {
            "config": "configs/gsm8k_cpu.yaml",
            "run.directory": folder,
            "run.name": "bench",
            "run.steps": steps,
            "rollout.batch_groups": batch_groups,
            "eval.dataset": "null",
            "trainer.checkpoint_every_steps": steps,
            "trainer.lr": 1e-6,
            **SIDES[side],
        }
        for key, value in settings.items():
            command += [f"--{key}", str(value)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side}: the run failed\n{done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]
    counted = lines[WARM_UP_STEPS:]
    return float(sum(line["time_step_s"] for line in counted) / sum(line["num_tokens"] for line in counted))


def measure(workload: str, *, rounds: int, steps: int, batch_groups: int) -> float:
    """Print every side's median; return the better synchronous one over the asynchronous one."""
    seen: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, values in seen.items():
            values.append(seconds_per_token(workload, side, steps=steps, batch_groups=batch_groups))
    medians = {side: statistics.median(values) for side, values in seen.items()}
    for side, values in seen.items():
        each = ", ".join(f"{1e6 * value:.0f}" for value in values)
        print(f"{workload}: {side:<24}{1e6 * medians[side]:>8.0f} us per trained token (rounds: {each})")
    ratio = min(medians[side] for side in REFERENCES) / medians["asynchronous"]
    print(f"{workload}: synchronous / asynchronous = {ratio:.2f}", flush=True)
    return ratio


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKFLOWS], nargs="+", default=[*WORKFLOWS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-groups", type=int, default=8)
    arguments = parser.parse_args()
    for workload in arguments.workload:
        measure(workload, rounds=arguments.rounds, steps=arguments.steps, batch_groups=arguments.batch_groups)


if __name__ == "__main__":
    main()
