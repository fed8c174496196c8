"""Copies in host memory have the shapes and types of what they are to hold."""

import torch

from areal_async.trainer.engine.host_copies import make_copies


def test_a_rank_beyond_a_parameters_rows_has_a_copy_without_any() -> None:
    """A critic's head has one row, which the first of two ranks has."""
    like = {
        "head": torch.empty(0, 8),
        "layer": torch.empty(3, 8, dtype=torch.bfloat16),
        "step": torch.empty(()),
    }

    copies = make_copies(like, is_pinned=False)

    assert {name: (copy.shape, copy.dtype) for name, copy in copies.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in like.items()
    }
