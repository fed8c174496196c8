"""What asynchrony is worth: wall clock per trained token, synchronous over asynchronous, and the share of the best.

    python -m tools.bench_async                     # every workload; about forty minutes on 2 cores
    python -m tools.bench_async --workload cpu --rounds 3
    python -m tools.bench_async --workload long_tail --servers 64

All sides are the real program (`python -m areal_async run`): broker, node, servers, trainer. Synchronous is
`max_staleness 0` with one and with two threads per process, the better of which counts: on 2 cores its server and
its trainer take turns, so either may use both. Asynchronous is `max_staleness 2` with one thread per process.

The bound is the best possible time for the same work: the larger of all its generation and all its training, each of
them alone on half of the cores, which is what it has when both run. That is a synchronous run of two steps with as many
groups in each as ALONE_BATCHES of the others: all are generated at once, then all are trained at once, so that neither
waits for the other, no batch has a tail of its own, and weights are handed over once. The second step counts.

`cpu` and `tool` generate by the embedded engine: `cpu` is bound by computing, in `tool` each trajectory waits for a
slow tool first. In `long_tail` and `turns` the servers take the time of ones with cards instead
(`tools/sleeping_server.py`): a step of 8 ms and 0.05 ms more for each request in it, 40 us for a prefilled token, as of
an 8B model in bf16 whose 16 GB are read at 3.3 TB/s, with some for the launching. Lengths are heavy-tailed: Pareto's in
the first two, in `long_tail` log-normal, p99 at 20 times the median; `turns` are one to six with a tool between.

The sides alternate over the rounds; per side the median round counts. Steps before WARM_UP_STEPS are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.sleeping_server import EVENT_TOKENS, PREFILL_S, REQUEST_S, TOKEN_S, interpreter

WARM_UP_STEPS: Final = 3
ALONE_BATCHES: Final = 6
PACE: Final = {TOKEN_S: "0.008", REQUEST_S: "0.00005", PREFILL_S: "0.00004", EVENT_TOKENS: "8"}


class Workload(NamedTuple):
    """What is generated, and how many groups of it are a batch."""

    workflow: str
    batch_groups: int
    is_paced: bool


WORKLOADS: Final = {
    "cpu": Workload("tools/heavy_tail.py:heavy_tail", 8, False),
    "tool": Workload("tools/heavy_tail.py:slow_tool", 8, False),
    "long_tail": Workload("tools/heavy_tail.py:long_tail", 32, True),
    "turns": Workload("tools/heavy_tail.py:turns", 16, True),
}
SIDES: Final = {
    "synchronous, 1 thread": {"rollout.max_staleness": 0, "trainer.num_threads": 1, "inference.num_threads": 1},
    "synchronous, 2 threads": {"rollout.max_staleness": 0, "trainer.num_threads": 2, "inference.num_threads": 2},
    "asynchronous": {"rollout.max_staleness": 2, "trainer.num_threads": 1, "inference.num_threads": 1},
}
REPOSITORY: Final = Path(__file__).parents[1]
REFERENCES: Final = ("synchronous, 1 thread", "synchronous, 2 threads")


def run(workload: Workload, what: str, settings: dict[str, Any], *, cores: set[int]) -> list[dict[str, Any]]:
    """Run the program once; return the lines of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "areal_async", "run", workload.workflow, "--no-display"]
        chosen = {
            "config": "configs/gsm8k_cpu.yaml",
            "run.directory": folder,
            "run.name": "bench",
            "rollout.batch_groups": workload.batch_groups,
            "eval.dataset": "null",
            "trainer.checkpoint_every_steps": settings["run.steps"],
            "trainer.lr": 1e-6,
            **settings,
        }
        if workload.is_paced:
            chosen |= {"inference.backend": "sglang", "inference.python": interpreter(Path(folder))}
        else:
            chosen["inference.num_servers"] = 1
        for key, value in chosen.items():
            command += [f"--{key}", str(value)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=REPOSITORY,
            env=os.environ | PACE | {"PYTHONPATH": str(REPOSITORY)}, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{what}: the run failed\n{done.stdout}{done.stderr}")
        return [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]


def alone(workload: Workload, settings: dict[str, Any], *, cores: set[int]) -> tuple[float, float]:
    """Return seconds per trained token of all generation, and of all training, each without the other."""
    settings |= {"run.steps": 2, "rollout.batch_groups": ALONE_BATCHES * workload.batch_groups}
    line = run(workload, "alone", settings | SIDES["synchronous, 1 thread"], cores=cores)[-1]
    wait_s = line["time_wait_data_s"]
    return wait_s / line["num_tokens"], (line["time_step_s"] - wait_s) / line["num_tokens"]


def measure(name: str, *, rounds: int, steps: int, num_servers: int) -> tuple[float, float]:
    """Print every side's median; return the better synchronous one over the asynchronous, and that one's share."""
    workload, all_cores = WORKLOADS[name], os.sched_getaffinity(0)
    settings = {"run.steps": steps, "inference.num_servers": num_servers}
    half = set(sorted(all_cores)[: max(1, len(all_cores) // 2)])
    seen: dict[str, list[float]] = {side: [] for side in (*SIDES, "generation alone", "training alone")}
    for _ in range(rounds):
        generation, training = alone(workload, dict(settings), cores=half)
        seen["generation alone"].append(generation)
        seen["training alone"].append(training)
        for side, of_side in SIDES.items():
            counted = run(workload, side, settings | of_side, cores=all_cores)[WARM_UP_STEPS:]
            seen[side].append(
                sum(line["time_step_s"] for line in counted) / sum(line["num_tokens"] for line in counted)
            )
    medians = {side: statistics.median(values) for side, values in seen.items()}
    for side, values in seen.items():
        each = ", ".join(f"{1e6 * value:.0f}" for value in values)
        print(f"{name}: {side:<24}{1e6 * medians[side]:>8.0f} us per trained token (rounds: {each})")
    ratio = min(medians[side] for side in REFERENCES) / medians["asynchronous"]
    share = max(medians["generation alone"], medians["training alone"]) / medians["asynchronous"]
    print(f"{name}: synchronous / asynchronous = {ratio:.2f}; {share:.0%} of the bound is reached", flush=True)
    return ratio, share


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS], nargs="+", default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--servers", type=int, default=4, help="of the workloads with paced ones")
    arguments = parser.parse_args()
    for workload in arguments.workload:
        measure(workload, rounds=arguments.rounds, steps=arguments.steps, num_servers=arguments.servers)


if __name__ == "__main__":
    main()
