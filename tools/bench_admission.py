"""How young tokens are with ``rollout.admission: fresh``, and at what cost, beside ``eager``: the default job in pairs.

    python -m tools.bench_admission                        # five seeds, about twenty minutes on two cores
    python -m tools.bench_admission --seeds 2 --steps 20

Each pair is two runs of the real program on the CPU under one seed, one after the other, which comes first changing
from pair to pair; they differ in the setting alone. Prints for each pair the mean staleness of the trained tokens,
steps per second after the first few, and the greedy accuracy on held-out rows at the end; then the ratios' means with
95 % intervals (Student's t over the pairs). Exits with 1 unless the staleness is at most 0.6 of eager's, the interval
of the speed's ratio reaches 0.97, and the accuracy is no lower than eager's by more than its own noise.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_async.process.json_lines import read_json_lines

REPOSITORY = Path(__file__).parents[1]
MOST_STALENESS = 0.6
"""Of eager's."""
LEAST_SPEED = 0.97
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


def run(directory: Path, admission: str, *, seed: int, num_steps: int) -> Result:
    """Run the default job once."""
    subprocess.run(
        [
            sys.executable, "-m", "areal_async", "run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml",
            "--no-display", "--run.directory", str(directory), "--run.name", "bench", "--run.steps", str(num_steps),
            "--run.seed", str(seed), "--eval.every_steps", str(num_steps), "--rollout.admission", admission,
        ],
        cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = read_json_lines(directory / "bench" / "metrics.jsonl")
    evaluated = read_json_lines(directory / "bench" / "eval.jsonl")
    shutil.rmtree(directory / "bench")
    later = [line for line in lines if line["step"] > WARM_STEPS]
    num_tokens = sum(line["num_tokens"] for line in later)
    staleness = sum(line["staleness_mean"] * line["num_tokens"] for line in later) / num_tokens
    return Result(staleness, len(later) / sum(line["time_step_s"] for line in later), evaluated[-1]["accuracy"])


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
    arguments = parser.parse_args()
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
