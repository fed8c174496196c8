"""What asynchrony is worth: wall clock per trained token, synchronous over asynchronous, and the share of the best.

    python -m tools.bench_async                     # every workload; about forty minutes on 2 cores
    python -m tools.bench_async --workload cpu --rounds 3
    python -m tools.bench_async --workload long_tail --servers 64

All sides are the real program (`python -m areal_async run`): broker, node, servers, trainer. Synchronous is
`max_staleness 0` with one and with two threads per process, the better of which counts: on 2 cores its server and
its trainer take turns, so either may use both. Asynchronous is the same with one thread per process and
`max_staleness 4`, which AReaL trains code with (arXiv:2505.24298; mathematics with 8). Where computing is the limit,
weights change in place, as in PipelineRL (arXiv:2509.19128): computing the cache anew for each version is work that
the bound does not have.

The bound is the best possible time for the same work: the larger of all its generation and all its training, each of
them alone on half of the cores. Each is measured in a synchronous run of two steps with as many groups in each as
ALONE_BATCHES of the others: all are generated at once, then all are trained at once, so that neither waits for the
other, no batch has a tail of its own, and weights are handed over once. The second step counts. When both run, what
generates keeps to one half too. Else the trainer's one thread shares its core with processes that wake up often, and
what that costs would look like a loss by overlapping.

`cpu` and `tool` generate by the embedded engine: `cpu` is bound by computing, in `tool` each trajectory waits for a
slow tool first. In `long_tail` and `turns` the servers take the time of ones with cards instead
(`tools/sleeping_server.py`), as of a model of 14.7B in bf16 on an H100: its 29.5 GB are read at 3.35 TB/s in 9 ms, and
3 ms go to the launching; each request in a step takes 0.08 ms more, to read 1,400 tokens of 0.2 MB of its cache, and
a prefilled token 60 us, at 500 TFLOP/s. Lengths are heavy-tailed: Pareto's in the first two, in `long_tail` log-normal,
p99 at 20 times the median; `turns` are one to six with a tool between.

In `long_tail` a synchronous step generates for most of its time, as is told of reasoning models: for 50 to 80 % of it
(DORA, of LongCat-Flash-Thinking), 70 % (RollPacker, arXiv:2509.21009), more than 90 % (APRIL, arXiv:2509.18521). Alone,
training takes longer than generation there: each wait for a batch is a loss.

The sides alternate over the rounds; per side the median round counts. Steps before WARM_UP_STEPS are left out. Beside
each side stands where its steps' time went: what is lost to overlapping is waiting for data; what processors are short
of is in the training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.sleeping_server import EVENT_TOKENS, PREFILL_S, REQUEST_S, TOKEN_S, interpreter

WARM_UP_STEPS: Final = 3
ALONE_BATCHES: Final = 6
PACE: Final = {TOKEN_S: "0.012", REQUEST_S: "0.00008", PREFILL_S: "0.00006", EVENT_TOKENS: "8"}


class Workload(NamedTuple):
    """What is generated, and how many groups of it are a batch."""

    workflow: str
    batch_groups: int
    is_paced: bool

    @property
    def overlapped(self) -> dict[str, Any]:
        """Settings of the asynchronous side."""
        return {"rollout.max_staleness": 4} | ({} if self.is_paced else {"inference.interrupt": "in_place"})


WORKLOADS: Final = {
    "cpu": Workload("tools/heavy_tail.py:heavy_tail", 16, False),
    "tool": Workload("tools/heavy_tail.py:slow_tool", 16, False),
    "long_tail": Workload("tools/heavy_tail.py:long_tail", 32, True),
    "turns": Workload("tools/heavy_tail.py:turns", 16, True),
}
SIDES: Final = {
    "synchronous, 1 thread": {"rollout.max_staleness": 0, "trainer.num_threads": 1, "inference.num_threads": 1},
    "synchronous, 2 threads": {"rollout.max_staleness": 0, "trainer.num_threads": 2, "inference.num_threads": 2},
    "asynchronous": {"trainer.num_threads": 1, "inference.num_threads": 1},
}
PARTS: Final = {"waits for data": "wait_data", "trains": "train", "hands over": "weights", "checkpoints": "checkpoint"}
"""Of a step's time, by the name of its number."""
REPOSITORY: Final = Path(__file__).parents[1]
REFERENCES: Final = ("synchronous, 1 thread", "synchronous, 2 threads")


def run(
    workload: Workload, what: str, settings: dict[str, Any], *, cores: set[int], generating: set[int] | None = None
) -> list[dict[str, Any]]:
    """Run the program once; return the lines of its steps.

    Args:
        cores: that the run has.
        generating: those of them that all but its trainer keep to.
    """
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
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=REPOSITORY, env=os.environ | PACE | {"PYTHONPATH": str(REPOSITORY)},
            preexec_fn=lambda: os.sched_setaffinity(0, generating or cores),
        )  # fmt: skip
        while generating and process.poll() is None and not give_trainer(folder, cores):
            time.sleep(0.1)
        said, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{what}: the run failed\n{said}")
        return [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]


def give_trainer(folder: str, cores: set[int]) -> bool:
    """Let the trainer of the run in a folder have these cores, whatever its starter has; say whether there is one."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            if "trainer" in words and any(word.startswith(folder) for word in words):
                for thread in (path / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)
                return True
        except OSError:
            continue  # it has just ended
    return False


def per_token(lines: Sequence[dict[str, Any]]) -> float:
    """Return seconds of a trained token over these steps."""
    return float(sum(line["time_step_s"] for line in lines) / sum(line["num_tokens"] for line in lines))


def parts(lines: Sequence[dict[str, Any]]) -> str:
    """Say what these steps' time went to."""
    total_s = sum(line["time_step_s"] for line in lines)
    shares = {what: sum(line[f"time_{name}_s"] for line in lines) / total_s for what, name in PARTS.items()}
    return ", ".join(f"{what} {share:.0%}" for what, share in shares.items())


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
    in_order = sorted(all_cores)
    half, rest = set(in_order[: max(1, len(in_order) // 2)]), set(in_order[len(in_order) // 2 :])
    seen: dict[str, list[float]] = {side: [] for side in (*SIDES, "generation alone", "training alone")}
    went: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        generation, training = alone(workload, dict(settings), cores=half)
        seen["generation alone"].append(generation)
        seen["training alone"].append(training)
        for side, of_side in SIDES.items():
            overlaps = "rollout.max_staleness" not in of_side
            chosen = settings | of_side | (workload.overlapped if overlaps else {})
            lines = run(workload, side, chosen, cores=all_cores, generating=rest if overlaps else None)[WARM_UP_STEPS:]
            seen[side].append(per_token(lines))
            went[side] += lines
    medians = {side: statistics.median(values) for side, values in seen.items()}
    for side, values in seen.items():
        each = ", ".join(f"{1e6 * value:.0f}" for value in values)
        print(f"{name}: {side:<24}{1e6 * medians[side]:>8.0f} us per trained token (rounds: {each})")
    for side, lines in went.items():
        print(f"{name}: {side:<24}{parts(lines)}")
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
