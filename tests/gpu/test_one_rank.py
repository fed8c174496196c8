"""A step of one rank on a GPU has the gradients of one on a CPU."""

from pathlib import Path

import pytest

from tests.gpu.layouts import TOLERANCES, hold_against_a_cpu


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rank_on_a_gpu_has_the_gradients_of_a_cpu(dtype: str, tmp_path: Path) -> None:
    hold_against_a_cpu("one", dtype, tmp_path)
