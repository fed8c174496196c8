"""Measure the trainer: trained tokens per CPU second of packed rows, beside what else could train the same batch.

    python -m tools.bench_trainer                                   # packed, dense, padded
    python -m tools.bench_trainer --trl-python VENV/bin/python      # and TRL's GRPOTrainer
    python -m tools.bench_trainer --device cuda                     # utilisation of a GPU instead (tools/bench_mfu.py)

The contenders have one model, one batch (GRPO, beta 0, a mean over tokens), one optimizer update a round and one
budget of tokens for a micro-batch, padding counted; each runs in its own process, they take turns, and medians are
printed. ``dense`` alone has another batch: as many rows, all of the mean length. Peak memory is the process's. That
they do the same is shown by the norm of the first gradient.

For TRL make an environment with CPU torch first (a looser range may bring CUDA):
``pip install torch==2.13.0`` and then ``pip install trl==1.16.0 -c tools/constraints.txt``.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench_lengths import KINDS, Prompted, draw
from tools.rounds import Contender

LAYOUTS = ("packed", "dense", "padded")
NORM_TOLERANCE = 1e-3
"""Relative difference of gradient norms between contenders that train the same batch."""


def main() -> int:
    """Print a table for each kind of lengths; exit with 1 when contenders did not compute the same."""
    arguments = _parser().parse_args()
    if arguments.device == "cuda":
        from tools import bench_mfu

        bench_mfu.main([])
        return 0
    status = 0
    for kind in arguments.lengths:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            batch = Path(folder, "batch.npz")
            print(write_batch(batch, kind, arguments))
            contenders = {}
            for name, command in _commands(batch, arguments).items():
                contenders[name] = Contender(
                    command, niceness=arguments.nice, threads=arguments.threads, deadline_s=arguments.deadline_s
                )
                running.callback(contenders[name].close)
            rounds = race(contenders, arguments.rounds)
        print_table(rounds)
        status |= not _agree(rounds)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny", help="Hugging Face folder with a tokenizer")
    parser.add_argument("--lengths", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="packed is always among them")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--token-budget", type=int, default=4096, help="of a packed row or a padded micro-batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0, help="niceness of the measured processes; below 0 needs root")
    parser.add_argument("--trl-python", help="python of an environment with TRL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for a contender's start and for each round")
    return parser


def write_batch(path: Path, kind: str, arguments: argparse.Namespace) -> str:
    """Write token ids, lengths, rewards and advantages of a batch; return what it is."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    drawn = draw(kind, tokenizer, groups=arguments.groups, group_size=arguments.group_size, seed=arguments.seed)
    chance = np.random.default_rng(arguments.seed)
    rewards = chance.integers(0, 2, (arguments.groups, arguments.group_size)).astype(np.float64)
    # As TRL has it: the sample's standard deviation, and 1e-4 beside it.
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.savez(
        path,
        token_ids=np.concatenate([_sequence(one, length, tokenizer, chance)
                                  for one in drawn for length in one.answer_lengths]),
        prompt_lengths=np.repeat([len(one.prompt_ids) for one in drawn], arguments.group_size),
        answer_lengths=np.concatenate([one.answer_lengths for one in drawn]),
        rewards=rewards.ravel(),
        advantages=advantages.ravel(),
        group_size=arguments.group_size,
    )  # fmt: skip
    lengths = [length for one in drawn for length in one.lengths]
    return (
        f"\n{kind}: {len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.1f} on "
        f"average, {sum(lengths):,} in all; micro-batches of {arguments.token_budget:,} tokens, "
        f"{arguments.threads} thread(s), {arguments.rounds} rounds"
    )


def _sequence(prompted: Prompted, length: int, tokenizer: Any, chance: np.random.Generator) -> Any:
    """Return a prompt and a random answer that ends as answers do."""
    said = chance.integers(3, len(tokenizer), length)
    said[-1] = tokenizer.eos_token_id
    return np.concatenate([prompted.prompt_ids, said])


def _commands(batch: Path, arguments: argparse.Namespace) -> dict[str, list[str]]:
    shared = ["--model", arguments.model, "--batch", str(batch)]
    shared += ["--token-budget", str(arguments.token_budget), "--threads", str(arguments.threads)]
    commands = {
        layout: [sys.executable, "-m", "tools.bench_trainer_ours", layout, *shared]
        for layout in LAYOUTS
        if layout in {"packed", *arguments.layouts}
    }
    if arguments.trl_python:
        commands["trl"] = [arguments.trl_python, "-m", "tools.bench_trainer_trl", *shared]
    return commands


def race(contenders: dict[str, Contender], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return each contender's rounds, after one that only warms up and shows the gradient."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(num_rounds + 1):
        for name, contender in contenders.items():
            rounds[name].append(contender.play())
    return rounds


def print_table(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians, the spread from the lowest to the highest round, memory and ratios."""
    rates = {name: _rates(played) for name, played in rounds.items()}
    base = statistics.median(rates["packed"])
    print(f"{'':<7} {'trained tok / CPU s':>20} {'lowest':>8} {'highest':>8} {'tok / wall s':>13} {'packed is':>10} "
          f"{'peak MB':>8} {'of it added':>12} {'gradient norm':>14}")  # fmt: skip
    for name, played in rounds.items():
        rate = statistics.median(rates[name])
        wall = statistics.median(one["num_tokens"] / one["wall_s"] for one in played[1:])
        last = played[-1]
        print(f"{name:<7} {rate:>20,.0f} {min(rates[name]):>8,.0f} {max(rates[name]):>8,.0f} {wall:>13,.0f} "
              f"{base / rate:>9.2f}x {last['peak_bytes'] / 1e6:>8,.0f} {last['added_bytes'] / 1e6:>12,.0f} "
              f"{played[0]['grad_norm']:>14.6f}")  # fmt: skip


def _rates(played: Sequence[dict[str, Any]]) -> list[float]:
    return [one["num_tokens"] / one["cpu_s"] for one in played[1:]]


def _agree(rounds: dict[str, list[dict[str, Any]]]) -> bool:
    """Return whether all that train the same batch came to the same gradient norm."""
    norms = {name: played[0]["grad_norm"] for name, played in rounds.items() if name != "dense"}
    apart = max(abs(norm / norms["packed"] - 1.0) for norm in norms.values())
    print(f"gradient norms of one batch differ by {apart:.1e} at most")
    return bool(apart <= NORM_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
