"""The gradients of a model over the ranks: their norms, part by part, and clipping."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from areal_async.trainer.engine.gradient_groups import GROUPS, groups_of, num_layers
from areal_async.trainer.engine.parallel.dims import ParallelDims, local_shard
from areal_async.trainer.engine.parallel.stages import StagedModel
from areal_async.trainer.engine.stats import Update


class Gradients:
    """The gradients of one model."""

    def __init__(self, model: Any, dims: ParallelDims) -> None:
        """Learn which parameter belongs to which part. A collective."""
        self._model = model
        self._dims = dims
        self._groups = self._group_members()

    def clip(self, loss: Tensor, *, max_norm: float) -> Update:
        """Scale the gradients down to ``max_norm``; return the norms they had over all ranks. A collective.

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
            self._dims.all.device
        )
        *by_group, total_loss = self._dims.all.reduce(sums, dist.ReduceOp.SUM).tolist()
        update = Update.of(dict(zip(GROUPS, by_group, strict=True)), has_finite_loss=math.isfinite(total_loss))
        if update.is_made and update.grad_norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / (update.grad_norm + 1e-6))
        return update

    @contextmanager
    @torch.no_grad()
    def as_parameters(self) -> Iterator[None]:
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

    def _group_members(self) -> list[list[float]]:
        """Return for each parameter which of ``GROUPS`` it is in, as ones and zeros. A collective."""
        names = [name for name, _ in self._model.named_parameters()]
        # A rank may hold some of the layers only; the last one's number tells how many there are.
        count = self._dims.all.largest(num_layers(names))
        groups = [groups_of(name, num_layers=count) for name in names]
        return [[float(group in own) for group in GROUPS] for own in groups]

    def _num_copies(self, gradient: Tensor | None) -> int:
        """Return how many ranks of a stage hold this rank's shard."""
        num_ranks = self._dims.ranks_per_stage
        if not isinstance(gradient, DTensor):
            return num_ranks
        mesh, placements = gradient.device_mesh, gradient.placements
        # A dimension along which a tensor is not replicated shards it; of those there are several kinds.
        is_sharded = [not isinstance(one, Replicate) for one in placements]
        return num_ranks // math.prod(mesh.size(dim) for dim, one in enumerate(is_sharded) if one)
