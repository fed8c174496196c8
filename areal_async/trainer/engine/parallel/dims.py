"""How the ranks of one model are divided, under the names of torchtitan's ``ParallelDims``.

A rank's number is ``((pp * dp_replicate + replica) * dp_shard + shard) * tp + part``: those that speak to each other
most, the tensor-parallel ones, are neighbours, so that they share a node. Ranks that differ in ``dp_replicate`` or
``dp_shard`` hold different rows; those that differ in ``pp`` or ``tp`` only hold the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from areal_async.config.settings import TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.ranks import Ranks

PP, DP_REPLICATE, DP_SHARD, TP = "pp", "dp_replicate", "dp_shard", "tp"
"""Stages of a pipeline, replicas of its weights, FSDP2's shards of one replica, and parts of each matrix."""
DIMENSIONS = (PP, DP_REPLICATE, DP_SHARD, TP)
"""Dimensions of the mesh, outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """The ranks of one model, and those among them that hold other rows than this one. Make it with ``of``."""

    all: Ranks
    data: Ranks
    """The ranks of this one's stage and part: together they hold a batch."""
    sizes: dict[str, int]
    """Ranks along each of ``DIMENSIONS``."""
    mesh: DeviceMesh
    """Has the dimensions that are larger than 1, and ``DP_SHARD`` where none is."""

    @classmethod
    def of(cls, ranks: Ranks, trainer: TrainerSettings) -> Self:
        """Divide the ranks as the settings say. A collective.

        Raises:
            UserError: they cannot be divided so.
        """
        pp, dp_replicate, tp = trainer.pipeline_parallel, trainer.replicas, trainer.tensor_parallel
        dp_shard, left = divmod(ranks.size, pp * dp_replicate * tp)
        if left:
            raise UserError(
                f"trainer: got {ranks.size} ranks for pipeline_parallel={pp}, replicas={dp_replicate}, "
                f"tensor_parallel={tp}, need a multiple of {pp * dp_replicate * tp}; change trainer.num_ranks"
            )
        sizes = dict(zip(DIMENSIONS, (pp, dp_replicate, dp_shard, tp), strict=True))
        if dp_shard == ranks.size:
            return cls(all=ranks, data=ranks, sizes=sizes, mesh=_flat_mesh(ranks))
        numbers = torch.arange(ranks.size).view(*sizes.values())
        used = [name for name in DIMENSIONS if sizes[name] > 1 or name == DP_SHARD]
        groups = [_group_along(numbers, (name,), ranks) for name in used]
        mesh = DeviceMesh.from_group(
            groups if len(used) > 1 else groups[0],
            ranks.device.type,
            mesh=numbers.view(*(sizes[name] for name in used)),
            mesh_dim_names=tuple(used),
        )
        # On a CPU too these are two groups: threads of their own use them.
        data = replace(
            ranks,
            rank=ranks.rank // tp % (dp_replicate * dp_shard),
            size=dp_replicate * dp_shard,
            control=_group_along(numbers, (DP_REPLICATE, DP_SHARD), ranks, backend=dist.get_backend(ranks.control)),
            tensors=_group_along(numbers, (DP_REPLICATE, DP_SHARD), ranks),
        )
        return cls(all=ranks, data=data, sizes=sizes, mesh=mesh)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one stage of the pipeline, neighbours in number."""
        return self.all.size // self.sizes[PP]

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline, from 0."""
        return self.all.rank // self.ranks_per_stage

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this rank, of those that hold the same rows, is the one that reports them."""
        return self.all.rank in self.reporting_ranks

    @property
    def reporting_ranks(self) -> range:
        """The ranks that report the rows of each data-parallel rank, in the order of those."""
        return range(0, self.data.size * self.sizes[TP], self.sizes[TP])

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The ranks that share each matrix with this one; None where there is no other."""
        return self.mesh[TP] if self.sizes[TP] > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The ranks that a stage's parameters are sharded over and, where there are replicas, copied over."""
        names = tuple(name for name in (DP_REPLICATE, DP_SHARD) if name in (self.mesh.mesh_dim_names or ()))
        return self.mesh[names] if self.mesh.ndim > len(names) else self.mesh


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter or a gradient: its shard, or all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return all of a parameter in another dtype; its shards may lie in the host's memory. A collective."""
    shard = parameter.detach().to(device=device, dtype=dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def _flat_mesh(ranks: Ranks) -> DeviceMesh:
    if ranks.tensors is None:
        return init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=(DP_SHARD,))
    return DeviceMesh.from_group(ranks.tensors, ranks.device.type, mesh_dim_names=(DP_SHARD,))


def _group_along(
    numbers: torch.Tensor, along: Sequence[str], ranks: Ranks, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return this rank's group of those that differ from it in these dimensions alone. All ranks make all of them."""
    inner = [DIMENSIONS.index(name) for name in along]
    outer = [dim for dim in range(len(DIMENSIONS)) if dim not in inner]
    members = numbers.permute(*outer, *inner).flatten(len(outer)).flatten(0, len(outer) - 1)
    deadline = timedelta(seconds=ranks.deadline_s)
    own: dist.ProcessGroup | None
    own, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=deadline, backend=backend)
    assert own is not None
    return own
