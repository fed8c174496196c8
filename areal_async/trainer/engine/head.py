"""The gradient of a head that is used a chunk of tokens at a time.

autograd adds the gradients of a weight's uses up in the weight's own dtype: over 150 chunks in bfloat16 the sum is off
by percents, where a single use is off by the rounding of its result, 0.2 percent. Here the sum is in float32, and
rounded once.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor


def weight_of_chunks(weight: Tensor, count: int) -> Iterator[Tensor]:
    """Yield the weight as each of ``count`` chunks is to use it, once; to be taken right before it is used.

    autograd runs first what was made last: were all taken before the first use, every chunk's gradient of the whole
    weight would wait until the last one is there.
    """
    if weight.dtype == torch.float32 or not weight.requires_grad:
        yield from [weight] * count
        return
    total = _Total(count)
    for _ in range(count):
        yield cast(Tensor, _SummedInFloat32.apply(weight, total))  # type: ignore[no-untyped-call]


class _Total:
    """A sum of so many gradients, in each backward pass anew."""

    def __init__(self, count: int) -> None:
        self._count = self._num_missing = count
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor | None:
        """Return the whole sum with the last gradient, nothing before."""
        total = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._num_missing -= 1
        if self._num_missing:
            self._sum = total
            return None
        self._sum, self._num_missing = None, self._count
        return total.to(gradient.dtype)


class _SummedInFloat32(torch.autograd.Function):
    """A weight as it is, whose gradients go into a total."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Total) -> Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(gradients[0]), None
