"""Explore the protocol: whole runs in memory, driven by production's rules, with crashes, zombies and lost messages.

    python -m tools.explore_protocol --steps 1000000 --seed 7

Prints what was explored; ends with the first broken promise and the seed of its run, if there is one.
"""

import argparse
import logging
import sys

import structlog

from tests.protocol.explorer import Found, Report, explore


def main() -> None:
    """Explore as far as is asked for."""
    parser = argparse.ArgumentParser(description="explore the protocol with faults")
    parser.add_argument("--steps", type=int, default=1_000_000, help="effects of processes, over all runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each next run takes the next one")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        report = explore(num_steps=args.steps, seed=args.seed)
    except Found as exc:
        sys.exit(f"violation: {exc}")
    print_report(report)


def print_report(report: Report) -> None:
    """Say what was explored."""
    rate = report.num_steps / report.duration_s
    print(f"{report.num_steps:,} steps in {report.num_runs:,} runs, {report.duration_s:.0f} s ({rate:,.0f} steps/s)")
    print(f"{len(report.states):,} different states, {report.num_faults:,} faults, no violation; every run ended")
    for what, count in sorted(report.seen.items()):
        print(f"{count:>9,} {what}")


if __name__ == "__main__":
    main()
