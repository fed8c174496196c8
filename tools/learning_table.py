"""What learns? Trains on the CPU, one run after another, and prints a row for each.

    python -m tools.learning_table                                        # the word problems by several algorithms
    python -m tools.learning_table --algorithms ppo gspo --out table.md
    python -m tools.learning_table --steps 40 -- --run.seed 2             # what stands after -- goes to every run
    python -m tools.learning_table --workflows                            # every workflow that ships, three seeds
    python -m tools.learning_table --workflows search coding --seeds 1

``reward`` is what was sampled at temperature 1, the mean of the first and of the last five steps. ``held out`` is the
greedy reward on rows that are never trained, before and after: of algorithms measured on the saved model by Hugging
Face's ``generate``, of workflows by the run's own evaluations. Exits with 1 when the reward of one rises by less than
0.2, when a workflow's held-out reward does not rise with it, or when one does not come to its end.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.check_learning import RUNS, Result, greedy_accuracy, result_of, run
from tools.make_tiny_gsm8k import MODEL, REPOSITORY

LEAST_GAIN = 0.2
NUM_STEPS = 100
"""Steps of an algorithm's run: some take longer than the one that the configuration is made for."""
WORKFLOW = "workflows/gsm8k.py"
WORKFLOWS = sorted(
    path.stem
    for path in (REPOSITORY / "workflows").glob("*.py")
    if (REPOSITORY / "configs" / f"{path.stem}_cpu.yaml").exists()
)
REWARD_MODEL = RUNS / "reward_model_tiny" / "model"
"""What ``preference`` is scored by; trained first where it is not there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What an algorithm's run sets beside its preset, and why."""

    settings: tuple[str, ...]
    why: str


CHOICES = {
    "ppo": Choice(
        ("--trainer.critic.lr", "1e-3"),
        "the critic starts without knowing anything and is to lead the policy: several times its rate",
    ),
    "grpo": Choice((), "the configuration is made for it"),
    "rloo": Choice((), "a sum over tokens is larger than their mean, which AdamW divides out again"),
    "dapo": Choice(
        (),
        "nothing; mind that its reward is of the groups that are trained, of which those that are all right are left "
        "out, so it understates what the policy can do: look at the held-out accuracy too",
    ),
    "gspo": Choice(
        ("--algorithm.num_minibatches", "2", "--algorithm.eps_clip", "0.02", "--algorithm.eps_clip_higher", "0.03"),
        "its ratio is 1 in the first update of a step, so two make it count; the paper's range of 3e-4 is that of a "
        "large model at a rate of 1e-6, and would clip nearly every sequence of the second update here",
    ),
}


def train(algorithm: str, settings: Sequence[str], *, before: float) -> Result | None:
    """Train one run from the start; None when it does not come to its end."""
    options = ["--algorithm.name", algorithm, *CHOICES[algorithm].settings, *settings]
    try:
        return run(f"table-{algorithm}", WORKFLOW, options, before=before)
    except subprocess.CalledProcessError as exc:
        print(f"{algorithm}: the run ended with {exc.returncode}")
        return None


def train_shipped(workflow: str, seed: int, settings: Sequence[str]) -> Result | None:
    """Train a workflow as it ships, from the start; None when it does not come to its end."""
    areal_async, name = [sys.executable, "-m", "areal_async"], f"table-{workflow}-{seed}"
    command = ["run", f"workflows/{workflow}.py", "--config", f"configs/{workflow}_cpu.yaml", "--fresh", "--no-display"]
    own = ["--run.name", name, "--run.seed", str(seed), *settings]
    try:
        if workflow == "preference" and not REWARD_MODEL.exists():
            teach = ["reward-model", "--config", "configs/reward_model_tiny.yaml"]
            subprocess.run([*areal_async, *teach], check=True, stdin=subprocess.DEVNULL)
        started = time.monotonic()
        subprocess.run([*areal_async, *command, *own], check=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as exc:
        print(f"{workflow}, seed {seed}: ended with {exc.returncode}")
        return None
    duration_s = time.monotonic() - started
    held_out = [json.loads(line)["accuracy"] for line in (RUNS / name / "eval.jsonl").read_text().splitlines()]
    return result_of(name, before=held_out[0], after=held_out[-1], duration_s=duration_s)


HEAD = ("run", "reward, first 5 steps", "last 5", "gain", "held out before", "after", "steps", "seconds")


def table(results: dict[str, Result | None]) -> str:
    """Return the rows, as Markdown that can be read as it is."""
    rows = [list(HEAD), *(_row(name, one) for name, one in results.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def _row(name: str, one: Result | None) -> list[str]:
    if one is None:
        return [name, "did not end", *[""] * (len(HEAD) - 2)]
    figures = (
        f"{one.first:.3f}",
        f"{one.last:.3f}",
        f"{one.reward_gain:+.2f}",
        f"{one.before:.3f}",
        f"{one.after:.3f}",
    )
    return [name, *figures, str(one.num_steps), f"{one.duration_s:.0f}"]


def laggards(results: dict[str, Result | None], *, is_held_out_to_rise: bool = False) -> list[str]:
    """Return those that have not learned enough."""
    return [
        name
        for name, one in results.items()
        if one is None or one.reward_gain < LEAST_GAIN or (is_held_out_to_rise and one.gain <= 0)
    ]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--algorithms", nargs="+", choices=CHOICES, default=list(CHOICES))
    what.add_argument("--workflows", nargs="*", choices=WORKFLOWS, help="these, as they ship; all where none is named")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of each workflow's runs")
    parser.add_argument(
        "--steps", type=int, help=f"of each run; left out: {NUM_STEPS} of an algorithm's, of a workflow's as it ships"
    )
    parser.add_argument("--out", type=Path, help="file to write the table to")
    parser.add_argument("settings", nargs="*", help="settings for every run, after --")
    arguments = parser.parse_args()
    is_of_workflows = arguments.workflows is not None
    num_steps = arguments.steps or (None if is_of_workflows else NUM_STEPS)
    settings = [*(["--run.steps", str(num_steps)] if num_steps else []), *arguments.settings]
    results: dict[str, Result | None] = {}

    def note(name: str, result: Result | None) -> None:
        results[name] = result
        if arguments.out is not None:
            # After each, so that what has been trained is not lost with what has not.
            arguments.out.write_text(table(results) + "\n", encoding="utf-8")

    if is_of_workflows:
        for workflow in arguments.workflows or WORKFLOWS:
            for seed in arguments.seeds:
                note(f"{workflow}, seed {seed}", train_shipped(workflow, seed, settings))
    else:
        before = greedy_accuracy(MODEL)
        for algorithm in arguments.algorithms:
            print(f"\n{algorithm}: {CHOICES[algorithm].why}", flush=True)
            note(algorithm, train(algorithm, settings, before=before))
    print(f"\n{table(results)}")
    late = laggards(results, is_held_out_to_rise=is_of_workflows)
    print(f"each gains at least {LEAST_GAIN}: " + (f"NO, not {', '.join(late)}" if late else "yes"))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
