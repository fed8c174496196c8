"""How young tokens are with ``rollout.admission: fresh``, and at what cost, beside ``eager``: the default job in pairs.

    python -m tools.bench_admission                        # five seeds, about twenty minutes on two cores
    python -m tools.bench_admission --seeds 2 --steps 20
    python -m tools.bench_admission --jump                 # one pair, a tool that becomes ten times as slow

Each pair is two runs of the real program on the CPU under one seed, one after the other, which comes first changing
from pair to pair; they differ in the setting alone. Prints for each pair the mean staleness of the trained tokens,
steps per second after the first few, and the greedy accuracy on held-out rows at the end; then the ratios' means with
95 % intervals (Student's t over the pairs). Exits with 1 unless the staleness is at most 0.6 of eager's, the interval
of the speed's ratio reaches 0.97, and the accuracy is no lower than eager's by more than its own noise.

With ``--jump`` every trajectory waits for a tool, which takes ten times as long from the middle of the run on: what has
been observed says then too little, and ``fresh`` has admitted too few. Prints the seconds that the trainer waited for
data in each later step of both, and exits with 1 when ``fresh`` has lost more by it, over all of them, than what
``max_staleness`` steps of eager's then take.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_async.process.json_lines import read_json_lines
from tools.heavy_tail import JUMP

REPOSITORY = Path(__file__).parents[1]
MOST_STALENESS = 0.6
"""Of eager's."""
LEAST_SPEED = 0.97
MAX_STALENESS = 2
"""Of the default job."""
WARM_STEPS = 5
NOISE = 0.03
"""One standard error of an accuracy over 256 rows."""
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t at 95 %, by degrees of freedom."""


class Result(NamedTuple):
    """What came of one run."""

    staleness: float
    steps_per_s: float
    accuracy: float


def command(directory: Path, admission: str, *, seed: int, num_steps: int, workflow: str) -> list[str]:
    """Return the default job with a workflow, as a command."""
    return [
        sys.executable, "-m", "areal_async", "run", workflow, "--config", "configs/gsm8k_cpu.yaml", "--no-display",
        "--run.directory", str(directory), "--run.name", "bench", "--run.steps", str(num_steps), "--run.seed",
        str(seed), "--rollout.admission", admission,
    ]  # fmt: skip


def run(directory: Path, admission: str, *, seed: int, num_steps: int) -> Result:
    """Run the default job once."""
    words = command(directory, admission, seed=seed, num_steps=num_steps, workflow="workflows/gsm8k.py")
    words += ["--eval.every_steps", str(num_steps)]
    subprocess.run(words, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    lines = read_json_lines(directory / "bench" / "metrics.jsonl")
    evaluated = read_json_lines(directory / "bench" / "eval.jsonl")
    shutil.rmtree(directory / "bench")
    later = [line for line in lines if line["step"] > WARM_STEPS]
    num_tokens = sum(line["num_tokens"] for line in later)
    staleness = sum(line["staleness_mean"] * line["num_tokens"] for line in later) / num_tokens
    return Result(staleness, len(later) / sum(line["time_step_s"] for line in later), evaluated[-1]["accuracy"])


def run_with_jump(directory: Path, admission: str, *, num_steps: int) -> list[dict[str, float]]:
    """Run it with the tool that becomes slow in the middle; return the lines of the steps from there on."""
    jump, metrics = directory / f"jump_{admission}", directory / "bench" / "metrics.jsonl"
    words = command(directory, admission, seed=1, num_steps=num_steps, workflow="tools/heavy_tail.py:jumping")
    process = subprocess.Popen(
        [*words, "--eval.dataset", "null"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        env=os.environ | {JUMP: str(jump)},
    )
    while process.poll() is None and not (metrics.exists() and len(read_json_lines(metrics)) >= num_steps // 2):
        time.sleep(0.1)
    jump.touch()
    if process.wait():
        sys.exit(f"{admission}: the run ended with status {process.returncode}")
    lines = read_json_lines(metrics)
    shutil.rmtree(directory / "bench")
    return lines[num_steps // 2 :]


def judge_jump(directory: Path, *, num_steps: int) -> int:
    """Measure and print what a jump costs."""
    lost: dict[str, float] = {}
    for admission in ("fresh", "eager"):
        lines = run_with_jump(directory, admission, num_steps=num_steps)
        waited = [line["time_wait_data_s"] for line in lines]
        lost[admission] = sum(waited)
        step_s = statistics.fmean(line["time_step_s"] for line in lines)
        each = " ".join(f"{one:.2f}" for one in waited)
        print(f"{admission}: {step_s:.2f} s a step; waited for data {lost[admission]:.2f} s: {each}", flush=True)
    num_lost = (lost["fresh"] - lost["eager"]) / step_s
    print(json.dumps({"steps_lost": round(num_lost, 2), "may_be": MAX_STALENESS}))
    return 0 if num_lost <= MAX_STALENESS else 1


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of some ratios and its 95 % interval; an endless one of a single ratio."""
    mean = statistics.fmean(ratios)
    if len(ratios) < 2:
        return mean, -math.inf, math.inf
    half = T_95.get(len(ratios) - 1, 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean, mean - half, mean + half


def main() -> int:
    """Measure, print a line for each pair and one JSON object, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jump", action="store_true")
    arguments = parser.parse_args()
    if arguments.jump:
        with tempfile.TemporaryDirectory(prefix="bench_admission_") as folder:
            return judge_jump(Path(folder), num_steps=arguments.steps)
    pairs: list[tuple[Result, Result]] = []
    with tempfile.TemporaryDirectory(prefix="bench_admission_") as folder:
        for seed in range(1, arguments.seeds + 1):
            order = ("fresh", "eager") if seed % 2 else ("eager", "fresh")
            found = {one: run(Path(folder), one, seed=seed, num_steps=arguments.steps) for one in order}
            pairs.append((found["fresh"], found["eager"]))
            said = "; ".join(
                f"{name} {one.staleness:.2f} versions, {one.steps_per_s:.3f} steps/s, accuracy {one.accuracy:.3f}"
                for name, one in found.items()
            )
            print(f"seed {seed}: {said}", flush=True)
    staleness = interval([fresh.staleness / eager.staleness for fresh, eager in pairs])
    speed = interval([fresh.steps_per_s / eager.steps_per_s for fresh, eager in pairs])
    accuracy = interval([fresh.accuracy - eager.accuracy for fresh, eager in pairs])
    numbers = {"staleness": staleness, "speed": speed, "accuracy": accuracy}
    print(json.dumps({name: [round(one, 4) for one in values] for name, values in numbers.items()}))
    is_good = staleness[0] <= MOST_STALENESS and speed[2] >= LEAST_SPEED
    return 0 if is_good and accuracy[0] >= -NOISE / math.sqrt(len(pairs)) else 1


if __name__ == "__main__":
    sys.exit(main())
