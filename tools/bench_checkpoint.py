"""Measure how long a checkpoint holds up the steps: written while they wait, beside written while they go on.

    python -m tools.bench_checkpoint
    python -m tools.bench_checkpoint --model Qwen/Qwen3-0.6B --directory /disk/scratch --rounds 5

One rank, one model; both ways take turns. A round is a checkpoint and the step after it: ``held up`` is the time until
that step may begin, ``on disk`` the time until the checkpoint is whole and synced, ``step`` how long the step took,
which shares processors and disk with the writing where that goes on beside it. Prints medians and the ratio.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.trainer.engine.checkpoint import CheckpointWriter
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow
from tools.compare_ranks import random_rows


class Round(NamedTuple):
    """Seconds."""

    held_up_s: float
    on_disk_s: float
    step_s: float


def main() -> None:
    """Print the table."""
    arguments = _parser().parse_args()
    settings = Settings(
        model=ModelSettings(path=str(arguments.model), dtype="float32"),
        trainer=TrainerSettings(token_budget=arguments.max_tokens * 4, num_threads=arguments.threads),
    )
    with (
        joined_ranks(deadline_s=600.0, num_threads=arguments.threads) as ranks,
        tempfile.TemporaryDirectory(dir=arguments.directory) as scratch,
    ):
        engines = Engines(actor=FsdpEngine.for_run(settings, ranks))
        writer = CheckpointWriter(ranks)
        rows = random_rows(
            arguments.sequences,
            max_tokens=arguments.max_tokens,
            vocab_size=engines.actor.vocab_size,
            seed=1,
        )
        folder = Path(scratch, "checkpoint")

        def stage() -> Callable[[], None]:
            writer.stage(engines.trained)
            return lambda: writer.write(folder, b"ledger")

        def save() -> Callable[[], None]:
            engines.save_checkpoint(folder, b"ledger")
            return lambda: None

        ways = {"waiting": save, "beside": stage}
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):  # the first warms up: it makes the moments and the copies
            for name, way in ways.items():
                made = _round(way, engines.actor, rows, step=number + 1)
                if number:
                    rounds[name].append(made)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{arguments.model}: {num_bytes / 1e6:,.0f} MB, {arguments.rounds} rounds, medians in seconds")
    print(f"{'':8} {'held up':>9} {'on disk':>9} {'step':>9}")
    medians = {name: Round(*map(statistics.median, zip(*own, strict=True))) for name, own in rounds.items()}
    for name, median in medians.items():
        print(f"{name:8} {median.held_up_s:9.4f} {median.on_disk_s:9.4f} {median.step_s:9.4f}")
    print(f"held up {medians['waiting'].held_up_s / medians['beside'].held_up_s:.1f} times shorter beside the steps")


def _round(way: Callable[[], Callable[[], None]], engine: FsdpEngine, rows: list[TrainRow], *, step: int) -> Round:
    started = time.perf_counter()
    rest = way()
    held_up_s = time.perf_counter() - started
    on_disk_s: list[float] = []

    def write() -> None:
        rest()
        on_disk_s.append(time.perf_counter() - started)

    writing = threading.Thread(target=write)
    writing.start()
    step_since = time.perf_counter()
    engine.train_step(rows, step=step, total_steps=step)
    step_s = time.perf_counter() - step_since
    writing.join()
    return Round(held_up_s, on_disk_s[0], step_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny", help="Hugging Face folder or name")
    parser.add_argument("--directory", help="on the disk that is measured; else a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
