"""How packed rows go through a model, forward and back, whatever the model's layout.

An ``Execution`` is told what to make of the model's outputs; which rank computes them is its own matter. Its calls
are collectives of the model's ranks, and every rank that holds the same rows gets the same results.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal_async.algorithms.objective import LossTerms
from areal_async.trainer.packing.rows import PackedRow

T = TypeVar("T")

Loss = Callable[[int, PackedRow, T], LossTerms]
"""Loss of a row, given its number, itself and what the model says of its scored tokens."""


class Execution(Protocol[T]):
    """What runs a model on packed rows. ``T``: the model's outputs for one row, tensors of [S]."""

    def fit_rows(self, num_rows: int) -> int:
        """Return how many rows a call is best divided into where it needs ``num_rows``: as many or more."""
        ...

    def infer(self, rows: Sequence[PackedRow]) -> list[T]:
        """Return the outputs for each row, without gradients."""
        ...

    def train(self, rows: Sequence[PackedRow], loss: Loss[T], *, scale: float) -> Iterator[LossTerms]:
        """Add the gradients of all rows, each loss times ``scale``, up over the data-parallel ranks: their mean.

        Yields the terms of each row, detached. The gradients are complete when the iterator is exhausted.
        """
        ...


class WholeModel(Generic[T]):
    """A model of one stage: a row goes through it at once."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` is called with a row and sharded by FSDP2."""
        self._model = model

    def fit_rows(self, num_rows: int) -> int:
        """Return what is needed: one row after the other takes as long as all together."""
        return num_rows

    @torch.no_grad()
    def infer(self, rows: Sequence[PackedRow]) -> list[T]:
        """Return the outputs for each row, without gradients."""
        outputs = [self._model(row) for row in rows]
        # No backward pass comes to do it; until it is done, the model's parameters are not those of the optimizer.
        cast(FSDPModule, self._model).reshard()
        return outputs

    def train(self, rows: Sequence[PackedRow], loss: Loss[T], *, scale: float) -> Iterator[LossTerms]:
        """Run row by row; gradients are summed locally and cross the ranks once, with the last row."""
        for number, row in enumerate(rows):
            cast(FSDPModule, self._model).set_requires_gradient_sync(number == len(rows) - 1)
            terms = loss(number, row, cast(Any, self._model)(row))
            (terms.loss * scale).backward()
            yield LossTerms(loss=terms.loss.detach(), sums=terms.sums, maxima=terms.maxima)
