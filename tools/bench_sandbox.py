"""Short programs per second: in the sandbox, beside the interpreter started for each without any wall.

    python -m tools.bench_sandbox                 # 600 programs per row
    python -m tools.bench_sandbox --sizes 1 2 4

`x bare` is the rate relative to `python -I -S` processes, as many at once, in the same run.
"""

import argparse
import logging
import os
import subprocess
import sys
import time

import anyio
import anyio.to_thread
import structlog
import uvloop

from areal_async.sandbox import Sandbox

SOURCE = "print(sum(map(int, input().split())))"
STDIN, STDOUT = b"1 2\n", b"3\n"


def run_bare() -> None:
    """Run the program without a sandbox."""
    command = [sys.executable, "-I", "-S", "-c", SOURCE]
    assert subprocess.run(command, input=STDIN, capture_output=True, check=True).stdout == STDOUT


async def rate_bare(num_programs: int, size: int) -> float:
    """Return bare programs per second, ``size`` at once."""
    limiter = anyio.CapacityLimiter(size)
    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for _ in range(num_programs):
            tasks.start_soon(lambda: anyio.to_thread.run_sync(run_bare, limiter=limiter))
    return num_programs / (time.monotonic() - started)


async def rate_sandboxed(num_programs: int, size: int) -> float:
    """Return sandboxed programs per second, ``size`` at once."""
    async with Sandbox(size=size) as sandbox:

        async def run() -> None:
            execution = await sandbox.run(SOURCE, stdin=STDIN)
            assert execution.stdout == STDOUT, execution

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(num_programs):
                tasks.start_soon(run)
        return num_programs / (time.monotonic() - started)


async def measure(arguments: argparse.Namespace) -> None:
    """Print a row per size."""
    print(f"{'at once':>8}{'bare /s':>10}{'sandbox /s':>12}{'x bare':>8}   ({os.cpu_count()} cores)")
    for size in arguments.sizes:
        bare = await rate_bare(arguments.programs, size)
        sandboxed = await rate_sandboxed(arguments.programs, size)
        print(f"{size:>8}{bare:>10.0f}{sandboxed:>12.0f}{sandboxed / bare:>8.2f}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
