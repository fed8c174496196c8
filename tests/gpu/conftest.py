"""Tests of what needs GPUs: skipped with what the machine lacks, or rehearsed on a CPU (``GPU_HOUR_DEVICE=cpu``)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.process.host import visible_gpus
from tests.gpu.machine import DEVICE
from tests.unit.trainer.rank_workers import RankWorkers
from tools.gpu_hour import STEPS, num_usable_gpus, sglang_python

FOLDER = Path(__file__).parent
_steps = {step.file: step for step in STEPS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = num_usable_gpus() if DEVICE == "cuda" else max(step.num_gpus for step in STEPS)
    for item in items:
        if item.path.parent != FOLDER:
            continue
        step = _steps[item.path.name]
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(step.deadline_s))
        lack = step.lack(num_gpus=num_gpus, has_sglang=sglang_python() is not None)
        if lack:
            item.add_marker(pytest.mark.skip(reason=f"not run: {lack}"))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankWorkers]:
    """Return two ranks on the last two devices: 0 is not among them where there are three."""
    first = max(0, len(visible_gpus()) - 2)
    with RankWorkers(2, first_device=first) as workers:
        yield workers
