"""What an arm costs the training: steps per second of runs with and without one, in pairs.

    python -m tools.bench_arms                    # about half an hour on two cores
    python -m tools.bench_arms --pairs 2 --steps 30

Each pair is two runs of the real program on the CPU, one after the other, which comes first changing from pair to pair;
they differ in the arm alone, which has the model that the run begins with. A run's speed is that of the steps after its
arm has its first pair: its server's start, which takes a processor for some seconds, is not the arm's work; of a run
without, the same steps are taken. Exits with 1 unless the median over the pairs of the speed with an arm is at least
95 % of that without.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.process.json_lines import read_json_lines

REPOSITORY = Path(__file__).parents[1]
LEAST_SHARE = 0.95
"""Of the speed without an arm."""
WARM_STEPS = 5


class Speed(NamedTuple):
    """What came of one run."""

    lines: list[dict[str, Any]]
    """Of its training steps."""
    first_step: int
    """After which its arm had its first pair; 0 without one."""
    num_pairs: int

    def steps_per_s(self, first_step: int) -> float:
        """Return it over the steps after that one."""
        seconds = [float(line["time_step_s"]) for line in self.lines if line["step"] > first_step]
        return len(seconds) / sum(seconds)


def run(directory: Path, *, num_steps: int, share: float) -> Speed:
    """Run once; ``share`` of 0 is without an arm."""
    arm = ["--arms.base.path", "configs/models/tiny", "--arms.base.share", str(share)] if share else []
    subprocess.run(
        [
            sys.executable, "-m", "areal_async", "run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml",
            "--no-display", "--run.directory", str(directory), "--run.name", "bench", "--run.steps", str(num_steps),
            "--eval.limit", "1", *arm,
        ],
        cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = read_json_lines(directory / "bench" / "metrics.jsonl")
    arms = read_json_lines(directory / "bench" / "arms.jsonl")
    paired = [line for line in arms if line["num_pairs"]]
    shutil.rmtree(directory / "bench")
    return Speed(lines, int(paired[0]["step"]) if paired else 0, int(arms[-1]["num_pairs"]) if arms else 0)


def main() -> int:
    """Measure, print a line for each pair and one JSON object, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.1)
    arguments = parser.parse_args()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench_arms_") as folder:
        for number in range(arguments.pairs):
            order = (arguments.share, 0.0) if number % 2 else (0.0, arguments.share)
            found = {share: run(Path(folder), num_steps=arguments.steps, share=share) for share in order}
            with_arm, without = found[arguments.share], found[0.0]
            first_step = max(with_arm.first_step, WARM_STEPS)
            speeds = [one.steps_per_s(first_step) for one in (with_arm, without)]
            ratios.append(speeds[0] / speeds[1])
            print(
                f"pair {number + 1}: {speeds[0]:.3f} steps/s with an arm of {with_arm.num_pairs} pairs, "
                f"{speeds[1]:.3f} without, {ratios[-1]:.3f} of it, over steps {first_step + 1} to {arguments.steps}",
                flush=True,
            )
    median = statistics.median(ratios)
    print(json.dumps({"median": round(median, 4), "ratios": [round(one, 4) for one in ratios]}))
    return 0 if median >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
