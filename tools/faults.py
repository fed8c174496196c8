"""Strike a real run with every fault of the matrix and account for every acknowledged trajectory afterwards.

    python -m tools.faults                          # all rows; 5 seeds where the timing is random
    python -m tools.faults --quick                  # a selection, one seed each
    python -m tools.faults --rows 6,24 --seeds 1    # some; --seed 4 repeats one that failed

Prints one line per row and exits with 1 unless every row passes: nothing lost, nothing trained twice, nothing over
age, the run's end reached by itself; negative controls must find what they were made to lose. What this machine
cannot do (no root for loop mounts, no older broker) says ``not run``, which is not a pass.
"""

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

from tools import faults_broker, faults_controls, faults_hosts, faults_power, faults_roles, faults_wire
from tools.faults_cases import FAIL, ROWS, Result, carry_out, merge

NUM_SEEDS = 5
MODULES = (faults_broker, faults_controls, faults_hosts, faults_power, faults_roles, faults_wire)


def print_line(result: Result) -> None:
    """Say how one seed of a row went."""
    accounts = result.accounts
    print(
        f"{result.verdict:8} row {result.row} seed {result.seed} in {result.duration_s:.0f} s: "
        f"acked {accounts.acked}, trained {accounts.trained}, stored {accounts.stored}, "
        f"dropped {_dropped(result)}, lost {len(accounts.lost)}, twice {len(accounts.twice)}, "
        f"over age {len(accounts.over_age)}" + "".join(f"; {note}" for note in result.notes),
        flush=True,
    )


def print_table(results: list[Result]) -> None:
    """Print one line per row, over its seeds."""
    table = Table(title="faults")
    for column in ("row", "fault", "verdict", "seeds"):
        table.add_column(column)
    for column in ("acked", "trained", "stored", "dropped", "lost", "twice", "over age", "recovery s", "RSS MB", "s"):
        table.add_column(column, justify="right")
    for result in results:
        accounts = result.accounts
        recovery = "" if result.recovery_s is None else f"{result.recovery_s:.1f}"
        counts = (accounts.acked, accounts.trained, accounts.stored, _dropped(result))
        bad = (len(accounts.lost), len(accounts.twice), len(accounts.over_age))
        measured = (recovery, result.peak_rss_bytes >> 20, f"{result.duration_s:.0f}")
        table.add_row(
            result.row, result.title, result.verdict, str(result.seed), *map(str, counts), *map(str, bad),
            *map(str, measured),
        )  # fmt: skip
    Console(width=200).print(table)


def _dropped(result: Result) -> str:
    return " ".join(f"{kind} {count}" for kind, count in sorted(result.accounts.dropped.items())) or "0"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a selection, one seed each")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="for rows whose timing is random")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--directory", type=Path, help="where runs are made; kept")
    parser.add_argument("--json", type=Path, help="write every result there, one object per line")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = [ROWS[number] for number in (arguments.rows.split(",") if arguments.rows else ROWS)]
    if arguments.quick:
        rows = [row for row in rows if row.is_quick]
    num_seeds = 1 if arguments.quick else arguments.seeds
    parent = arguments.directory or Path(tempfile.mkdtemp(prefix="faults-"))
    table = []
    for row in rows:
        results = []
        seeds = [arguments.seed] if arguments.seed else range(1, (num_seeds if row.is_random else 1) + 1)
        for seed in seeds:
            directory = parent / f"row-{row.number}-{seed}"
            results.append(carry_out(row, seed, directory, keeps=arguments.directory is not None))
            print_line(results[-1])
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(asdict(results[-1])) + "\n")
        table.append(merge(results))
    if not list(parent.iterdir()):
        parent.rmdir()
    print_table(table)
    sys.exit(1 if any(result.verdict == FAIL for result in table) else 0)


if __name__ == "__main__":
    main()
