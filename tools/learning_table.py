"""Which algorithms learn? Trains the CPU job with each, one after another, and prints a row for each.

    python -m tools.learning_table                                        # ppo, grpo, rloo, dapo and gspo
    python -m tools.learning_table --algorithms ppo gspo --out table.md
    python -m tools.learning_table --steps 40 -- --run.seed 2             # what stands after -- goes to every run

``reward`` is what was sampled at temperature 1, the mean of the first and of the last five steps; ``held out`` the
greedy accuracy on unseen problems before and after, measured on the saved model by Hugging Face's ``generate``. Exits
with 1 when the reward of one rises by less than 0.2, or when one does not come to its end.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.check_learning import Result, greedy_accuracy, run
from tools.make_tiny_gsm8k import MODEL

LEAST_GAIN = 0.2
WORKFLOW = "workflows/gsm8k.py"


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


HEAD = ("algorithm", "reward, first 5 steps", "last 5", "gain", "held out before", "after", "steps", "minutes")


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
    return [name, *figures, str(one.num_steps), f"{one.duration_s / 60:.1f}"]


def laggards(results: dict[str, Result | None]) -> list[str]:
    """Return those that have not learned enough."""
    return [name for name, one in results.items() if one is None or one.reward_gain < LEAST_GAIN]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--steps", type=int, help="training steps of each run; the configuration's when left out")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    parser.add_argument("settings", nargs="*", help="settings for every run, after --")
    arguments = parser.parse_args()
    settings = [*(["--run.steps", str(arguments.steps)] if arguments.steps else []), *arguments.settings]
    before = greedy_accuracy(MODEL)
    results: dict[str, Result | None] = {}
    for algorithm in arguments.algorithms:
        print(f"\n{algorithm}: {CHOICES[algorithm].why}", flush=True)
        results[algorithm] = train(algorithm, settings, before=before)
        if arguments.out is not None:
            # After each, so that what has been trained is not lost with what has not.
            arguments.out.write_text(table(results) + "\n", encoding="utf-8")
    print(f"\n{table(results)}")
    late = laggards(results)
    print(f"each gains at least {LEAST_GAIN}: " + (f"NO, not {', '.join(late)}" if late else "yes"))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
