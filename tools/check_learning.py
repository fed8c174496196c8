"""Is it learning, and not an artefact? Runs the CPU job under several seeds and once with shuffled rewards.

    python -m tools.check_learning                       # 3 seeds and the control
    python -m tools.check_learning --seeds 1 -- --rollout.max_staleness 0 --trainer.num_ranks 2

Prints a row per run: the sampled reward of the first and the last five steps, the greedy accuracy on unseen
problems before and after (measured here on the saved model, by Hugging Face's `generate`), the largest staleness.
Exits with 1 when a seed's accuracy rises by less than 0.1 or the control's rises at all beyond the noise.
What stands after `--` goes to every run as it is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_gsm8k import DATA, MODEL, accuracy

RUNS = Path("runs")
NUM_EDGE_STEPS = 5
NUM_PROBLEMS = 256
LEAST_GAIN = 0.1
NOISE = 0.03
"""One standard error of an accuracy of 0.4 over 256 problems."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    name: str
    first: float
    last: float
    before: float
    after: float
    staleness_max: int
    num_steps: int
    duration_s: float

    @property
    def gain(self) -> float:
        """Change of the greedy accuracy."""
        return self.after - self.before

    @property
    def reward_gain(self) -> float:
        """Change of the sampled reward."""
        return self.last - self.first


def run(
    name: str,
    workflow: str,
    arguments: list[str],
    *,
    before: float,
    inside: Callable[[list[str]], list[str]] = list,
    environment: Mapping[str, str] = os.environ,
) -> Result:
    """Train one run from the start; its output passes through.

    Args:
        inside: makes of its command the one that runs it elsewhere.
    """
    command = [sys.executable, "-m", "areal_async", "run", workflow, "--config", "configs/gsm8k_cpu.yaml", "--fresh"]
    started = time.monotonic()
    command = inside([*command, "--run.name", name, *arguments])
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**environment})
    duration_s = time.monotonic() - started
    return result_of(name, before=before, after=greedy_accuracy(RUNS / name / "model"), duration_s=duration_s)


def result_of(name: str, *, before: float, after: float, duration_s: float) -> Result:
    """Read what a finished run came to."""
    lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines]
    return Result(
        name=name,
        first=statistics.mean(rewards[:NUM_EDGE_STEPS]),
        last=statistics.mean(rewards[-NUM_EDGE_STEPS:]),
        before=before,
        after=after,
        staleness_max=max(line["staleness_max"] for line in lines),
        num_steps=len(lines),
        duration_s=duration_s,
    )


def greedy_accuracy(folder: Path) -> float:
    """Return the share of unseen problems that a saved model answers rightly."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = (DATA / "gsm8k_tiny_test.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROBLEMS]
    return accuracy(model, tokenizer, [json.loads(text) for text in texts], temperature=0.0)


def report(results: list[Result], control: Result | None) -> bool:
    """Print the table; say whether everything is as it must be."""
    print(f"\n{'run':<16}{'reward first':>13}{'last':>7}{'greedy before':>15}{'after':>7}{'staleness':>11}{'time':>8}")
    for row in [*results, *([control] if control else [])]:
        print(
            f"{row.name:<16}{row.first:>13.3f}{row.last:>7.3f}{row.before:>15.3f}{row.after:>7.3f}"
            f"{row.staleness_max:>11}{row.duration_s:>7.0f}s"
        )
    learns = all(row.gain >= LEAST_GAIN for row in results)
    print(f"every seed gains at least {LEAST_GAIN}: {'yes' if learns else 'NO'}")
    is_honest = control is None or control.gain <= NOISE
    if control is not None:
        print(f"the control gains {control.gain:+.3f}, at most {NOISE}: {'yes' if is_honest else 'NO'}")
    return learns and is_honest


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--no-control", action="store_true", help="leave the run with shuffled rewards out")
    parser.add_argument("settings", nargs="*", help="settings for every run, after --")
    arguments = parser.parse_args()
    before = greedy_accuracy(MODEL)
    results = []
    for seed in arguments.seeds:
        settings = ["--run.seed", str(seed), *arguments.settings]
        results.append(run(f"learn-{seed}", "workflows/gsm8k.py", settings, before=before))
    control = None
    if not arguments.no_control:
        control = run("learn-control", "tools/shuffled_gsm8k.py", arguments.settings, before=before)
    sys.exit(0 if report(results, control) else 1)


if __name__ == "__main__":
    main()
