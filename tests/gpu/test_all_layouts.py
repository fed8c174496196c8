"""A step in each layout on GPUs has the gradients of one rank on a CPU."""

from pathlib import Path

import pytest

from areal_async.process.host import visible_gpus
from tests.gpu.layouts import TOLERANCES, hold_against_a_cpu
from tests.gpu.machine import DEVICE
from tools.compare_layouts import LAYOUTS

OF_TWO, OF_FOUR = (",".join(name for name, (size, _) in LAYOUTS.items() if size == ranks) for ranks in (2, 4))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_layouts_of_two_ranks_have_the_gradients_of_a_cpu(dtype: str, tmp_path: Path) -> None:
    hold_against_a_cpu(OF_TWO, dtype, tmp_path)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_layouts_of_four_ranks_have_the_gradients_of_a_cpu(dtype: str, tmp_path: Path) -> None:
    if DEVICE == "cpu" or len(visible_gpus()) < 4:
        pytest.skip(f"not run: needs 4 GPUs, got {len(visible_gpus())}")
    hold_against_a_cpu(OF_FOUR, dtype, tmp_path)
