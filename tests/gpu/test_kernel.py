"""Attention over a packed row by a GPU's kernel is that of a CPU in float32, to bfloat16's rounding."""

import pytest
import torch
from torch import Tensor, nn

from areal_async.trainer.engine import attention
from areal_async.trainer.engine.attention import Documents, packed_attention
from tests.gpu.machine import DEVICE, device, report

LENGTHS = [300, 1, 64, 129]
TOLERANCE = 2e-2


@pytest.mark.parametrize("window", [None, 2, 50])
@pytest.mark.parametrize("width", [64, 128])
def test_a_packed_row_is_attended_by_the_kernel_as_on_a_cpu(
    window: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1, sum(LENGTHS), heads, width) for heads in (8, 2, 2)]
    direction = torch.randn(1, sum(LENGTHS), 8, width)
    expected = _attend(parts, direction, window)
    if DEVICE == "cuda":  # nothing else may do it
        monkeypatch.setattr(attention, "_attend_batches", None)

    *parts, direction = (one.to(device(), torch.bfloat16) for one in (*parts, direction))
    seen = _attend(parts, direction, window)

    errors = [
        float(torch.linalg.norm(one.cpu().float() - other) / torch.linalg.norm(other))
        for one, other in zip(seen, expected, strict=True)
    ]
    report(f"attention, window {window}, width {width}: largest relative error {max(errors):.1e}")
    assert max(errors) < TOLERANCE


def _attend(parts: list[Tensor], direction: Tensor, window: int | None) -> list[Tensor]:
    """Return the output, and the gradient of its sum along ``direction`` by query, key and value."""
    leaves = [part.detach().requires_grad_() for part in parts]
    documents = Documents(lengths=LENGTHS, device=direction.device)
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    output, _ = packed_attention(nn.Identity(), query, key, value, None, documents=documents, sliding_window=window)
    return [output.detach(), *torch.autograd.grad((output * direction).sum(), leaves)]
