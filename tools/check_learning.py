"""Is it learning, and not an artefact? Runs a CPU job under several seeds and once with shuffled rewards.

    python -m tools.check_learning                       # the word problems: 3 seeds and the control
    python -m tools.check_learning --job clevr_count     # counting in images: these, and once with noise for images
    python -m tools.check_learning --seeds 1 -- --rollout.max_staleness 0 --trainer.num_ranks 2

Prints a row per run: the sampled reward of the first and the last five steps, the greedy accuracy on unseen
rows before and after (measured here on the saved model, by Hugging Face's `generate`), the largest staleness.
Exits with 1 when a seed's accuracy rises too little (0.1, counting 0.25), the control's rises at all beyond the noise,
or noise is counted any better than by chance. What stands after `--` goes to every run as it is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import make_tiny_counter
from tools.make_clevr_count import MOST_ITEMS
from tools.make_tiny_gsm8k import DATA, MODEL, accuracy

RUNS = Path("runs")
NUM_EDGE_STEPS = 5
NUM_PROBLEMS = 256
LEAST_GAIN = 0.1
NOISE = 0.03
"""One standard error of an accuracy of 0.4 over 256 problems."""


BLIND_NOISE = 0.06
"""Three standard errors of an accuracy of 1 in 9 over 256 images."""


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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and what is expected of it."""

    workflow: str
    config: str
    model: Path
    accuracy: Callable[[Path], float]
    """Greedy accuracy of a saved model on unseen rows."""
    least_gain: float
    control: str
    """The workflow with shuffled rewards."""
    blind: str | None = None
    """The workflow with noise for images."""
    chance: float = 0.0
    """Accuracy of the best guess."""


def greedy_accuracy(folder: Path) -> float:
    """Return the share of unseen problems that a saved model answers rightly."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = (DATA / "gsm8k_tiny_test.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROBLEMS]
    return accuracy(model, tokenizer, [json.loads(text) for text in texts], temperature=0.0)


def counting_accuracy(folder: Path) -> float:
    """Return the share of unseen pictures whose things a saved model counts rightly."""
    return make_tiny_counter.accuracy(folder, NUM_PROBLEMS, temperature=0.0)


GSM8K = Job(
    workflow="workflows/gsm8k.py",
    config="configs/gsm8k_cpu.yaml",
    model=MODEL,
    accuracy=greedy_accuracy,
    least_gain=LEAST_GAIN,
    control="tools/shuffled_gsm8k.py",
)
CLEVR_COUNT = Job(
    workflow="workflows/clevr_count.py",
    config="configs/clevr_count_cpu.yaml",
    model=make_tiny_counter.MODEL,
    accuracy=counting_accuracy,
    least_gain=0.25,
    control="tools/shuffled_clevr_count.py",
    blind="tools/blind_clevr_count.py",
    chance=1 / MOST_ITEMS,
)
JOBS = {"gsm8k": GSM8K, "clevr_count": CLEVR_COUNT}


def run(
    name: str,
    workflow: str,
    arguments: list[str],
    *,
    before: float,
    job: Job = GSM8K,
    inside: Callable[[list[str]], list[str]] = list,
    environment: Mapping[str, str] = os.environ,
) -> Result:
    """Train one run from the start; its output passes through.

    Args:
        job: whose run it is.
        inside: makes of its command the one that runs it elsewhere.
    """
    command = [sys.executable, "-m", "areal_async", "run", workflow, "--config", job.config, "--fresh"]
    started = time.monotonic()
    command = inside([*command, "--run.name", name, *arguments])
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**environment})
    duration_s = time.monotonic() - started
    return result_of(name, before=before, after=job.accuracy(RUNS / name / "model"), duration_s=duration_s)


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


def run_blind(job: Job, arguments: list[str]) -> Result:
    """Train with noise for images; the accuracies are the run's own, which is shown noise there too."""
    assert job.blind is not None
    result = run("learn-blind", job.blind, arguments, before=0.0, job=job)
    held_out = [json.loads(line)["accuracy"] for line in (RUNS / result.name / "eval.jsonl").read_text().splitlines()]
    return replace(result, before=held_out[0], after=held_out[-1])


def report(results: list[Result], control: Result | None, *, job: Job = GSM8K, blind: Result | None = None) -> bool:
    """Print the table; say whether everything is as it must be."""
    print(f"\n{'run':<16}{'reward first':>13}{'last':>7}{'greedy before':>15}{'after':>7}{'staleness':>11}{'time':>8}")
    for row in [*results, *(one for one in (control, blind) if one)]:
        print(
            f"{row.name:<16}{row.first:>13.3f}{row.last:>7.3f}{row.before:>15.3f}{row.after:>7.3f}"
            f"{row.staleness_max:>11}{row.duration_s:>7.0f}s"
        )
    learns = all(row.gain >= job.least_gain for row in results)
    print(f"every seed gains at least {job.least_gain}: {'yes' if learns else 'NO'}")
    is_honest = control is None or control.gain <= NOISE
    if control is not None:
        print(f"the control gains {control.gain:+.3f}, at most {NOISE}: {'yes' if is_honest else 'NO'}")
    looks = blind is None or blind.after <= job.chance + BLIND_NOISE
    if blind is not None:
        print(
            f"noise is counted at {blind.after:.3f}, at most {job.chance + BLIND_NOISE:.3f}: {'yes' if looks else 'NO'}"
        )
    return learns and is_honest and looks


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, default="gsm8k")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--no-control", action="store_true", help="leave the runs that must not learn out")
    parser.add_argument("settings", nargs="*", help="settings for every run, after --")
    arguments = parser.parse_args()
    job = JOBS[arguments.job]
    before = job.accuracy(job.model)
    results = []
    for seed in arguments.seeds:
        settings = ["--run.seed", str(seed), *arguments.settings]
        results.append(run(f"learn-{seed}", job.workflow, settings, before=before, job=job))
    control = blind = None
    if not arguments.no_control:
        control = run("learn-control", job.control, arguments.settings, before=before, job=job)
        blind = run_blind(job, arguments.settings) if job.blind else None
    sys.exit(0 if report(results, control, job=job, blind=blind) else 1)


if __name__ == "__main__":
    main()
