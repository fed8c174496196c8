"""Every GPU that was given multiplies, in each type of number, and torch sees as many as the driver."""

import pytest
import torch

from tests.gpu.machine import DEVICE, device, report
from tools.gpu_hour import num_usable_gpus


def test_torch_sees_the_gpus_that_are_counted_here() -> None:
    if DEVICE == "cuda":
        assert torch.cuda.is_available(), "torch sees no GPU: is it a build for CUDA, and does the driver suit it?"
        assert torch.cuda.device_count() == num_usable_gpus()
        assert torch.cuda.is_bf16_supported()
        report(f"CUDA {torch.version.cuda}, nccl {torch.cuda.nccl.version()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_gpu_multiplies_as_a_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 256, 256).to(dtype)
    expected = left.float() @ right.float()

    for index in range(torch.cuda.device_count() if DEVICE == "cuda" else 1):
        product = left.to(device(index)) @ right.to(device(index))
        error = torch.linalg.norm(product.cpu().float() - expected) / torch.linalg.norm(expected)
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), index
