"""What the engines of all roles are: a model over all ranks, packed passes through it, and optimizer updates of it.

Invariant: whatever the number of ranks and whichever of them holds a row, an update has the gradient that one rank
with all rows would compute. Loss denominators are counts over all ranks; ranks that run out of rows go on with empty
ones, so that the collectives inside the model meet. Nothing here draws random numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from areal_async.algorithms.aggregation import TOKEN_MEAN, Aggregation, TokenShare
from areal_async.config.settings import TrainerSettings
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.checkpoint import TrainState
from areal_async.trainer.engine.gradient_groups import GROUPS, groups_of, num_layers
from areal_async.trainer.engine.optimizer import learning_rate, make_optimizer
from areal_async.trainer.engine.parallel.dims import ParallelDims, local_shard
from areal_async.trainer.engine.parallel.division import divide
from areal_async.trainer.engine.parallel.execution import Execution, Loss
from areal_async.trainer.engine.parallel.pipeline import execution_of
from areal_async.trainer.engine.parallel.stages import StagedModel
from areal_async.trainer.engine.parallel.tensor import sum_over_tp
from areal_async.trainer.engine.stats import Tally, Update
from areal_async.trainer.packing.flops import DecoderFlops, decoder_flops
from areal_async.trainer.packing.pack import Parts
from areal_async.trainer.packing.rows import PackedRow, TrainRow, empty_row, pack_rows

T = TypeVar("T")

log = structlog.get_logger()


class ModelEngine(Generic[T]):
    """A model over the ranks, and forward passes through it. ``T``: what the model says of a row (``execution``)."""

    def __init__(self, model: Any, dims: ParallelDims, *, trainer: TrainerSettings, num_outputs: int) -> None:
        """Run ``model``, sharded already, on rows of at most ``trainer.token_budget`` tokens.

        Args:
            num_outputs: tensors of [S] that the model answers a row with; a tuple where there are several.
        """
        self.dims = dims
        self.flops: DecoderFlops = decoder_flops(model.decoder)
        """Operations of the whole model, by which rows are made to cost alike."""
        self._model = model
        self._execution: Execution[T] = execution_of(model, dims, num_outputs=num_outputs)
        self._trainer = trainer

    @property
    def vocab_size(self) -> int:
        """Words of the model's embedding."""
        return int(self._model.decoder.config.vocab_size)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return copies of all parameters, whole, in float32, on the CPU of rank 0; nothing elsewhere. A collective."""
        buckets = weights.plan(self._model.decoder, torch.float32, max_bytes=0)
        return weights.gather(self._model.decoder, buckets, self.dims.all)

    def _infer(self, rows: Sequence[TrainRow], forward: Callable[[list[PackedRow]], list[Tensor]]) -> list[Tensor]:
        """Return for each row what ``forward`` says of every token in its loss; 0 elsewhere [L]. A collective."""
        results = [torch.zeros(row.num_tokens) for row in rows]
        scored = [place for place, row in enumerate(rows) if row.loss_mask.any()]
        trained = [rows[place] for place in scored]
        parts = self._divide(trained)
        for members, outputs_S in zip(parts, forward(self._pack(trained, parts)), strict=True):
            values_S = outputs_S.cpu()
            for member in members:
                place = scored[member]
                count = int(rows[place].loss_mask.sum())
                results[place][torch.from_numpy(rows[place].loss_mask)] = values_S[:count]
                values_S = values_S[count:]
        return results

    def _divide(self, rows: Sequence[TrainRow]) -> Parts:
        """Return which rows share a packed one: as many parts on every rank, some perhaps empty. A collective."""
        budget, fit = self._trainer.token_budget, self._execution.fit_rows
        return divide(rows, flops=self.flops, token_budget=budget, ranks=self.dims.data, fit=fit)

    def _pack(
        self,
        rows: Sequence[TrainRow],
        parts: Parts,
        shares: Sequence[TokenShare] | None = None,
        columns: Sequence[str] = (),
    ) -> list[PackedRow]:
        """Return the packed rows of ``_divide``'s parts, an empty one for each that is empty."""
        device = self.dims.all.device
        return [
            pack_rows([rows[i] for i in members], device, [shares[i] for i in members] if shares else None)
            if members
            else empty_row(device, columns)
            for members in parts
        ]


class TrainedEngine(ModelEngine[T]):
    """A model that is trained, and its optimizer."""

    def __init__(
        self,
        model: Any,
        dims: ParallelDims,
        *,
        trainer: TrainerSettings,
        num_outputs: int,
        num_minibatches: int = 1,
        aggregation: Aggregation = TOKEN_MEAN,
    ) -> None:
        super().__init__(model, dims, trainer=trainer, num_outputs=num_outputs)
        self._num_minibatches = num_minibatches
        self._aggregation = aggregation
        self._groups = self._gradient_groups()
        self._optimizer = make_optimizer((one for one in model.parameters() if one.requires_grad), trainer)
        self._on_gradients: Callable[[], None] | None = None

    @property
    def trained(self) -> TrainState:
        """What a checkpoint holds of this engine. No collective."""
        return TrainState(self._model.decoder, self._optimizer)

    def watch_gradients(self, see: Callable[[dict[str, Tensor]], None]) -> None:
        """Have ``see`` called in every update with each parameter's gradient, whole, before clipping, on rank 0's CPU.

        On the other ranks it is called with nothing. The update takes as much longer as gathering the model does.
        """

        def gather() -> None:
            with self._gradients_as_parameters():
                gradients = self.full_parameters()
            see(gradients)

        self._on_gradients = gather

    def _set_peak(self, lr: float) -> None:
        """Take another peak of the learning rate's schedule, from the next step on."""
        self._trainer = self._trainer.model_copy(update={"lr": lr})

    def _begin(self, step: int, *, total_steps: int) -> float:
        """Take over and return the learning rate of training step ``step``, which counts from 1."""
        lr = learning_rate(step, total_steps=total_steps, trainer=self._trainer)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _minibatches(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> list[list[PackedRow]]:
        """Return the packed rows of each update; those that train nothing are left out. A collective.

        Args:
            columns: that the rows of every rank bring.
        """
        trained = [row for row in rows if row.loss_mask.any()]
        # A trajectory's rows share its position, and are together on one rank and in one mini-batch.
        lengths = Counter[int]()
        for row in trained:
            lengths[row.index] += int(row.loss_mask.sum())
        minibatches = []
        for turn in range(self._num_minibatches):
            own = [row for row in trained if row.index % self._num_minibatches == turn]
            shares = [self._aggregation.share(lengths[row.index]) for row in own]
            minibatches.append(self._pack(own, self._divide(own), shares, columns))
        return minibatches

    def _update_with(
        self, minibatches: Sequence[Sequence[PackedRow]], loss_of: Callable[[int], Loss[T]], *, step: int, event: str
    ) -> Tally:
        """Make an optimizer update from each mini-batch that trains a token on any rank. A collective.

        Args:
            loss_of: makes the loss of a mini-batch of this number, when those before it are done.
            event: logged where updates of ``step`` are left out because they were not finite.
        """
        tally = Tally()
        for number, minibatch in enumerate(minibatches):
            units = torch.stack([row.units_S.sum() for row in minibatch]).sum() if minibatch else torch.zeros(())
            units = units.double().to(self.dims.all.device)
            denominator = self.dims.data.reduce(units, dist.ReduceOp.SUM).item()
            if denominator:
                self._update(minibatch, loss_of(number), tally, denominator=denominator)
        if tally.num_skipped:
            log.warning(event, step=step, num_skipped=tally.num_skipped, reason="not finite")
        return tally

    def _update(self, minibatch: Sequence[PackedRow], loss: Loss[T], tally: Tally, *, denominator: float) -> None:
        """Make one optimizer update from the gradients of all these rows on all ranks. A collective."""
        # Gradients are the mean over ranks, and the loss is a mean over the units of all ranks: undo the former.
        scale = self.dims.data.size / denominator
        terms = list(self._execution.train(minibatch, loss, scale=scale))
        if self.dims.tp_mesh is not None:
            sum_over_tp(self._model, self.dims.tp_mesh.get_group())
        if self._on_gradients is not None:
            self._on_gradients()
        update = self._clip_gradients(torch.stack([one.loss.double() for one in terms]).sum())
        tally.add_update(update, terms, minibatch)
        if update.is_made:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    @torch.no_grad()
    def _gradients_as_parameters(self) -> Iterator[None]:
        """Let every parameter hold its gradient instead for a while: then what gathers the one gathers the other."""
        locals_ = [(local_shard(one), one.grad) for one in self._model.parameters()]
        values = [local.clone() for local, _ in locals_]
        for local, gradient in locals_:
            local.copy_(local_shard(gradient)) if gradient is not None else local.zero_()
        try:
            yield
        finally:
            for (local, _), value in zip(locals_, values, strict=True):
                local.copy_(value)

    def _clip_gradients(self, loss: Tensor) -> Update:
        """Scale the gradients down to ``max_grad_norm``; return the norms they had over all ranks.

        Args:
            loss: this rank's; one that is not finite on any rank keeps every rank from the update, as a gradient does.
        """
        every = zip(self._model.parameters(), self._groups, strict=True)
        trained = [(p, groups) for p, groups in every if p.grad is not None]
        gradients = [local_shard(cast(Tensor, p.grad)) for p, _ in trained]
        # Several ranks, of a stage or of two, may hold the same shard, which counts once.
        num_stages = self._model.num_holders() if isinstance(self._model, StagedModel) else {}
        copies = torch.tensor(
            [self._num_copies(p.grad) * num_stages.get(id(p), 1) for p, _ in trained], dtype=torch.float64
        )
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        squares = squares / copies.to(squares.device)
        members = torch.tensor([groups for _, groups in trained], dtype=torch.float64)
        # One sum for each group; the last is the loss, which only has to be finite.
        sums = torch.cat([squares @ members.to(squares.device), loss.to(squares.device).view(1)]).to(
            self.dims.all.device
        )
        *by_group, total_loss = self.dims.all.reduce(sums, dist.ReduceOp.SUM).tolist()
        update = Update.of(dict(zip(GROUPS, by_group, strict=True)), has_finite_loss=math.isfinite(total_loss))
        if update.is_made and update.grad_norm > self._trainer.max_grad_norm:
            torch._foreach_mul_(gradients, self._trainer.max_grad_norm / (update.grad_norm + 1e-6))
        return update

    def _gradient_groups(self) -> list[list[float]]:
        """Return for each parameter which of ``GROUPS`` it is in, as ones and zeros. A collective."""
        names = [name for name, _ in self._model.named_parameters()]
        # A rank may hold some of the layers only; the last one's number tells how many there are.
        count = self.dims.all.largest(num_layers(names))
        groups = [groups_of(name, num_layers=count) for name in names]
        return [[float(group in own) for group in GROUPS] for own in groups]

    def _num_copies(self, gradient: Tensor | None) -> int:
        """Return how many ranks of a stage hold this rank's shard."""
        num_ranks = self.dims.ranks_per_stage
        if not isinstance(gradient, DTensor):
            return num_ranks
        mesh, placements = gradient.device_mesh, gradient.placements
        # A dimension along which a tensor is not replicated shards it; of those there are several kinds.
        is_sharded = [not isinstance(one, Replicate) for one in placements]
        return num_ranks // math.prod(mesh.size(dim) for dim, one in enumerate(is_sharded) if one)
