"""A rank that runs out of memory says so and ends the crew, though its peer waits for it in a collective."""

import sys
from pathlib import Path

import anyio
import pytest

from areal_async.launch.backend import Process, ProcessSpec
from areal_async.launch.local import LocalBackend
from areal_async.launch.process_group import Death, run_together
from areal_async.process.host import LOOPBACK, free_port
from tests.gpu.machine import ROOT

pytestmark = pytest.mark.anyio

DEADLINE_S = 240.0
"""Far less than the 600 s that the ranks would wait for each other."""


async def test_out_of_memory_on_one_rank_ends_both(tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    specs = [
        ProcessSpec(
            name=f"trainer-{rank}",
            command=(sys.executable, "-m", "tests.gpu.one_of_two_out_of_memory"),
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            output=tmp_path / f"{rank}.out",
        )
        for rank in range(2)
    ]
    processes: list[Process] = []
    death: Death | None = None

    with anyio.fail_after(DEADLINE_S):
        death = await run_together(specs, LocalBackend(), on_start=processes.append)
        statuses = [await process.wait() for process in processes]

    assert death is not None
    assert all(statuses)
    assert "memory" in (tmp_path / "1.out").read_text()
