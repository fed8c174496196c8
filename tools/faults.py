"""Inject every fault of the matrix into a real run, and count what became of every acknowledged trajectory.

    python -m tools.faults                          # all rows; 5 seeds where the timing is random
    python -m tools.faults --quick                  # a selection, one seed each; under 8 minutes
    python -m tools.faults --rows 6,24 --seeds 1    # some; --seed 4 repeats one that failed

Prints one line per row and exits with 1 unless every row passes: nothing lost, nothing trained twice, nothing over
age, the run's end reached by itself, and in rows that stop a process nobody else named by the watchdog; negative
controls must find what they were made to lose. What this machine cannot do (no root for loop mounts, no older broker)
says ``not run``, which is not a pass.

A run waits for half of its time, so two go on at once; rows that hold it to short deadlines come last, one by one.
"""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from rich.console import Console
from rich.table import Table

from tools import (
    faults_broadcast,
    faults_broker,
    faults_controls,
    faults_files,
    faults_hosts,
    faults_images,
    faults_node,
    faults_power,
    faults_roles,
    faults_versions,
    faults_watch,
    faults_wire,
)
from tools.faults_cases import FAIL, PASS, ROWS, Result, Row, carry_out, failed, merge

NUM_SEEDS = 5
NUM_LANES = 2
MODULES = (
    faults_broadcast,
    faults_broker,
    faults_controls,
    faults_files,
    faults_hosts,
    faults_images,
    faults_node,
    faults_power,
    faults_roles,
    faults_versions,
    faults_watch,
    faults_wire,
)


class Job(NamedTuple):
    """A row and its seed."""

    row: Row
    seed: int


def plan(rows: Iterable[Row], *, num_seeds: int) -> list[Job]:
    """Return every row with its first seed, then those that are random with their second, and so on."""
    chosen = list(rows)
    return [Job(row, seed) for seed in range(1, num_seeds + 1) for row in chosen if seed == 1 or row.is_random]


def carry_out_all(jobs: list[Job], parent: Path, *, num_lanes: int, keeps: bool) -> Iterator[Result]:
    """Give results as they come: of ``num_lanes`` jobs at once, then of those that are to be alone."""

    def run(job: Job) -> Result:
        return carry_out(job.row, job.seed, parent / f"row-{job.row.number}-{job.seed}", keeps=keeps)

    for is_alone, lanes in ((False, num_lanes), (True, 1)):
        executor = ThreadPoolExecutor(lanes)
        try:
            futures = {executor.submit(run, job): job for job in jobs if job.row.is_alone is is_alone}
            for future in as_completed(futures):
                error = future.exception()
                if error is not None:
                    traceback.print_exception(error)
                yield future.result() if error is None else failed(*futures[future], error)
        finally:  # interrupted, it begins nothing more
            executor.shutdown(cancel_futures=True)


def in_order(number: str) -> tuple[bool, int, str]:
    """Return what sorts the rows: the matrix by its numbers, then the controls."""
    digits = "".join(filter(str.isdigit, number))
    return not number[0].isdigit(), int(digits), number


def print_line(result: Result) -> None:
    """Say how one seed of a row went."""
    counts = result.counts
    print(
        f"{result.verdict:8} row {result.row} seed {result.seed} in {result.duration_s:.0f} s: "
        f"acked {counts.acked}, trained {counts.trained}, stored {counts.stored}, "
        f"dropped {_dropped(result)}, lost {len(counts.lost)}, twice {len(counts.twice)}, "
        f"over age {len(counts.over_age)}, cpu {result.cpu_s:.0f} s" + "".join(f"; {note}" for note in result.notes),
        flush=True,
    )


def print_table(results: list[Result]) -> None:
    """Print one line per row, over its seeds."""
    table = Table(title="faults")
    for column in ("row", "fault", "verdict", "seeds"):
        table.add_column(column)
    for column in ("acked", "trained", "stored", "dropped", "lost", "twice", "over age"):
        table.add_column(column, justify="right")
    table.add_column("named")
    for column in ("recovery s", "RSS MB", "CPU s", "s"):
        table.add_column(column, justify="right")
    for result in results:
        counts = result.counts
        recovery = "" if result.recovery_s is None else f"{result.recovery_s:.1f}"
        figures = (counts.acked, counts.trained, counts.stored, _dropped(result))
        bad = (len(counts.lost), len(counts.twice), len(counts.over_age))
        measured = (recovery, result.peak_rss_bytes >> 20, f"{result.cpu_s:.0f}", f"{result.duration_s:.0f}")
        table.add_row(
            result.row, result.title, result.verdict, str(result.seed), *map(str, figures), *map(str, bad),
            ", ".join(result.named), *map(str, measured),
        )  # fmt: skip
    Console(width=240).print(table)


def _dropped(result: Result) -> str:
    return " ".join(f"{kind} {count}" for kind, count in sorted(result.counts.dropped.items())) or "0"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a selection, one seed each")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="for rows whose timing is random")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--lanes", type=int, default=NUM_LANES, help="runs at once")
    parser.add_argument("--directory", type=Path, help="where runs are made; kept")
    parser.add_argument("--json", type=Path, help="write every result there, one object per line")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    numbers = arguments.rows.split(",") if arguments.rows else sorted(ROWS, key=in_order)
    rows = [ROWS[number] for number in numbers]
    if arguments.quick:
        rows = [row for row in rows if row.is_quick]
    jobs = plan(rows, num_seeds=1 if arguments.quick else arguments.seeds)
    if arguments.seed:
        jobs = [Job(row, arguments.seed) for row in rows]
    parent = arguments.directory or Path(tempfile.mkdtemp(prefix="faults-"))
    started, results = time.monotonic(), []
    for result in carry_out_all(jobs, parent, num_lanes=arguments.lanes, keeps=arguments.directory is not None):
        print_line(result)
        results.append(result)
        if arguments.json:
            with arguments.json.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
    if not list(parent.iterdir()):
        parent.rmdir()
    table = [merge([result for result in results if result.row == row.number]) for row in rows]
    print_table(table)
    num_passed, minutes = sum(result.verdict == PASS for result in table), (time.monotonic() - started) / 60
    print(f"{num_passed} of {len(table)} rows passed, in {minutes:.1f} minutes")
    sys.exit(1 if any(result.verdict == FAIL for result in table) else 0)


if __name__ == "__main__":
    main()
