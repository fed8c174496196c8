"""A step of one rank on a GPU has the gradients of one on a CPU, and its weights come to the host whole."""

from pathlib import Path

import pytest
import torch

from areal_async.trainer.engine.host_copies import SideCopies, make_copies, unpin_copies
from tests.gpu.layouts import TOLERANCES, hold_against_a_cpu
from tests.gpu.machine import DEVICE, device

is_gpu = DEVICE == "cuda"


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rank_on_a_gpu_has_the_gradients_of_a_cpu(dtype: str, tmp_path: Path) -> None:
    hold_against_a_cpu("one", dtype, tmp_path)


def test_weights_reach_pinned_memory_beside_what_the_gpu_does_next() -> None:
    """The bytes are those of when a copy was started, though they were still being computed then."""
    copying, num_lots, shape = SideCopies(device()), 4, (1 << 20,)
    pinned = make_copies({str(one): torch.empty(shape, device="meta") for one in range(num_lots)}, is_pinned=is_gpu)
    product = torch.eye(4096, device=device()) if is_gpu else torch.eye(64)

    for one in range(num_lots):
        for _ in range(10):
            product = product @ product  # keeps the stream busy, so that a copy that did not wait would be of zeros
        source = torch.zeros(shape, device=device()) + product[0, 0] * (one + 1)
        copying.start([pinned[str(one)]], [source])
        del source
        torch.full(shape, -1.0, device=device())  # takes the place of what was freed too early
    copying.finish()

    assert [pinned[str(one)].unique().tolist() for one in range(num_lots)] == [[1.0], [2.0], [3.0], [4.0]]
    if is_gpu:
        assert all(one.is_pinned() for one in pinned.values())
        unpin_copies(pinned)
        assert not any(one.is_pinned() for one in pinned.values())
