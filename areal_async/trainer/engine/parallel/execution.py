"""How packed rows go through a model, forward and back, whatever the model's layout.

An ``Execution`` is told what to make of the model's outputs; which rank computes them is its own matter. Its calls
are collectives of the model's ranks, and every rank that holds the same rows gets the same results.

In a pipeline each rank holds a part of the layers, and the rows of a call are its microbatches, in torch's own
schedules (1F1B; interleaved where a rank holds several stages). Every rank of a pipeline has the rows, so only hidden
states and their gradients travel; those are filled up to the widest row of the call, and a stage computes on its row's
own tokens alone. The last stage makes the loss; what the model said of the rows then goes to all, and each makes the
same terms of it.

A batch is divided into as many rows as the schedule takes (``fit_rows``); where there are too few sequences for that,
empty rows fill it up and train nothing.

Invariant: between two rows a rank keeps the gradients of its own shard alone. Each row's are reduce-scattered, block by
block, while it goes back; what copies of a shard have to say to each other (HSDP) waits for the last row.

Source: Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters, arXiv 2104.04473.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward

from areal_async.algorithms.objective import LossTerms
from areal_async.trainer.engine.parallel.dims import PP, ParallelDims
from areal_async.trainer.engine.parallel.stages import StagedModel
from areal_async.trainer.packing.rows import PackedRow, empty_row

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
        """Run row by row, each forward and back before the next."""
        for number, row in enumerate(rows):
            cast(FSDPModule, self._model).set_requires_all_reduce(number == len(rows) - 1)
            terms = loss(number, row, cast(Any, self._model)(row))
            (terms.loss * scale).backward()
            yield LossTerms(loss=terms.loss.detach(), sums=terms.sums, maxima=terms.maxima)


class _ShardedStage(PipelineStage):
    """A stage sharded by FSDP2 that treats microbatches as ``WholeModel`` does rows.

    torch's own keeps the gradients whole, and the parameters gathered, until the last microbatch.
    """

    def backward_maybe_with_nosync(
        self, _backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Go back through one microbatch: all at once (``full``), as these schedules do."""
        cast(FSDPModule, self.submod).set_requires_all_reduce(last_backward)
        return stage_backward(**bwd_kwargs), None


class PipelineExecution(Generic[T]):
    """Runs rows through the stages of one pipeline. Its calls are collectives of the pipeline's ranks too."""

    def __init__(self, model: StagedModel, dims: ParallelDims) -> None:
        self._model = model
        self._device = dims.all.device
        self._num_ranks = dims.sizes[PP]
        self._num_outputs = model.own_stages[0].model.num_outputs

    def fit_rows(self, num_rows: int) -> int:
        """Return what the schedule takes without empty rows, and at least one for each rank of the pipeline."""
        return num_microbatches(num_rows, num_ranks=self._num_ranks, is_interleaved=self._is_interleaved)

    @torch.no_grad()
    def infer(self, rows: Sequence[PackedRow]) -> list[T]:
        """Return the outputs for each row, without gradients, on every rank of the pipeline."""
        return self._run(rows, None, scale=1.0)

    def train(self, rows: Sequence[PackedRow], loss: Loss[T], *, scale: float) -> Iterator[LossTerms]:
        """Run the rows forward and back; those of tied weights meet when all are done."""
        outputs = self._run(rows, loss, scale=scale)
        self._model.share_gradients()
        for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            yield loss(number, row, output)

    def _run(self, rows: Sequence[PackedRow], loss: Loss[T] | None, *, scale: float) -> list[T]:
        """Return the outputs for each row, detached; with a loss, add up its gradients on the way."""
        if not rows:
            return []
        count = self.fit_rows(len(rows))
        filled = [*rows, *(empty_row(self._device) for _ in range(count - len(rows)))]
        width = max(len(row.token_ids_T) for row in filled)
        for stage in self._model.own_stages:
            stage.begin(filled, width=width)

        def total(output: Any, place: Tensor) -> Tensor:
            number = int(place)
            if loss is None or number >= len(rows):
                return torch.stack([one.sum() for one in _tensors(output)]).sum() * 0.0
            return loss(number, rows[number], output).loss * scale

        schedule = self._schedule(count, width, total if loss is not None else None)
        # The first stage takes its tokens from the rows; schedules want an argument that they can divide.
        arguments = (torch.zeros(count, 1, device=self._device),) if self._model.own_numbers[0] == 0 else ()
        schedule.step(*arguments, target=torch.arange(count), return_outputs=False)
        return self._shared(rows)

    def _schedule(self, count: int, width: int, total: Callable[[Any, Tensor], Tensor] | None) -> Any:
        """Return the schedule of one call: shapes, and with them the buffers of a schedule, differ between calls."""
        model = self._model
        between = torch.empty(
            1, width, model.config.hidden_size, dtype=model.dtype, device="meta", requires_grad=total is not None
        )
        first, last = torch.empty(1, 1, device="meta"), torch.empty(1, device="meta")
        stages: list[Any] = [
            _ShardedStage(
                stage,
                number,
                model.num_stages,
                self._device,
                input_args=first if stage.is_first else between,
                output_args=(last,) * self._num_outputs if stage.is_last else between,
                group=model.pp_group,
            )
            for number, stage in zip(model.own_numbers, model.own_stages, strict=True)
        ]
        # Losses are sums whose denominator is in the scale: no division by the number of microbatches.
        if self._is_interleaved:
            return ScheduleInterleaved1F1B(stages, count, loss_fn=total, scale_grads=False)
        return Schedule1F1B(stages[0], count, loss_fn=total, scale_grads=False)

    def _shared(self, rows: Sequence[PackedRow]) -> list[T]:
        """Return what the last stage answered each row with, on every rank of the pipeline."""
        sizes = [len(row.targets_S) for row in rows for _ in range(self._num_outputs)]
        last = self._model.own_stages[-1]
        if last.is_last:
            flat = torch.cat([one for answer in last.answers[: len(rows)] for one in _tensors(answer)])
        else:
            flat = torch.empty(sum(sizes), device=self._device)
        dist.broadcast(flat, group=self._model.pp_group, group_src=self._num_ranks - 1)
        parts = flat.split(sizes)
        if self._num_outputs == 1:
            return cast(list[T], list(parts))
        every = range(0, len(parts), self._num_outputs)
        return cast(list[T], [tuple(parts[start : start + self._num_outputs]) for start in every])

    @property
    def _is_interleaved(self) -> bool:
        return len(self._model.own_numbers) > 1


def num_microbatches(num_rows: int, *, num_ranks: int, is_interleaved: bool) -> int:
    """Return the fewest microbatches, not fewer than the rows, that keep a schedule's ranks at work.

    That is one for each rank at least. The interleaved schedule goes in rounds of that many or more, all of one size.
    """
    least = max(num_rows, num_ranks)
    if not is_interleaved:
        return least
    return next(count for count in itertools.count(least) if count % (count // num_ranks) == 0)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def execution_of(model: Any, dims: ParallelDims) -> Execution[Any]:
    """Return what runs a model, cut into stages or whole."""
    return PipelineExecution(model, dims) if isinstance(model, StagedModel) else WholeModel(model)
