"""Run a module once per rank, as a launcher would, and wait for all of them.

Each rank is forked from one process that has imported what they need, which takes longer than most of what they do.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_async.process.host import free_port

ROOT = Path(__file__).parents[3]
_ranks = multiprocessing.get_context("forkserver")
_ranks.set_forkserver_preload(["tests.unit.trainer.imported"])


def run_on_ranks(num_ranks: int, module: str, *arguments: str, deadline_s: float = 250.0) -> list[str]:
    """Return what each rank printed.

    Raises:
        AssertionError: a rank's exit status is not 0, or it ran past the deadline.
    """
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(num_ranks)]
        processes = [
            _ranks.Process(
                target=_be_a_rank,
                args=(module, arguments, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, output),
            )
            for rank, output in enumerate(outputs)
        ]
        ends_at = time.monotonic() + deadline_s
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, ends_at - time.monotonic()))
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
            errors = output.with_suffix(".errors").read_text()
            assert status is not None, f"rank {rank} did not end within {deadline_s:g} s: {errors[-2000:]}"
            assert status == 0, f"rank {rank} ended with {status}: {errors[-2000:]}"
        return [output.read_text() for output in outputs]


def _be_a_rank(module: str, arguments: tuple[str, ...], environment: Mapping[str, str], output: Path) -> None:
    for number, path in ((1, output), (2, output.with_suffix(".errors"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
