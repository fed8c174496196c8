"""Run a module once per rank, as a launcher would, and wait for all of them."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from areal_async.host import free_port

ROOT = Path(__file__).parents[3]


def run_on_ranks(num_ranks: int, module: str, *arguments: str, deadline_s: float = 150.0) -> list[str]:
    """Return what each rank printed.

    Raises:
        AssertionError: a rank's exit status is not 0.
        subprocess.TimeoutExpired: a rank ran past the deadline.
    """
    port = free_port()
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=ROOT,
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(num_ranks)
        ]
        try:
            results = [process.communicate(timeout=deadline_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, results, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}: {errors[-2000:]}"
    return [output for output, _ in results]
