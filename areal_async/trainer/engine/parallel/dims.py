"""How the ranks of one model are divided: stages of a pipeline, copies, shards, and parts of each matrix.

A rank's number is ``((stage * copies + copy) * shards + shard) * parts + part``: those that speak to each other most,
the parts of one matrix, are neighbours, so that they share a node. Ranks that differ in ``copy`` or ``shard`` hold
different rows (data parallel); those that differ in ``stage`` or ``part`` only hold the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_async.config.settings import TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.ranks import Ranks

STAGE, COPY, SHARD, PART = "stage", "copy", "shard", "part"
"""The grid's dimensions, outermost first."""
DIMENSIONS = (STAGE, COPY, SHARD, PART)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """The ranks of one model, and those among them that hold other rows than this one. Make it with ``of``."""

    all: Ranks
    data: Ranks
    """The ranks with the same stage and part as this one: together they hold a batch."""
    sizes: dict[str, int]
    mesh: DeviceMesh
    """Of the dimensions that are larger than 1, and of ``SHARD`` where none is."""

    @classmethod
    def of(cls, ranks: Ranks, trainer: TrainerSettings) -> Self:
        """Divide the ranks as the settings say. A collective.

        Raises:
            UserError: they cannot be divided so.
        """
        stages, copies, parts = trainer.pipeline_parallel, trainer.replicas, trainer.tensor_parallel
        num_shards, left = divmod(ranks.size, stages * copies * parts)
        if left:
            raise UserError(
                f"trainer: got {ranks.size} ranks for pipeline_parallel={stages}, replicas={copies}, "
                f"tensor_parallel={parts}, need a multiple of {stages * copies * parts}; change trainer.num_ranks"
            )
        sizes = dict(zip(DIMENSIONS, (stages, copies, num_shards, parts), strict=True))
        if num_shards == ranks.size:
            return cls(all=ranks, data=ranks, sizes=sizes, mesh=_flat_mesh(ranks))
        numbers = torch.arange(ranks.size).view(*sizes.values())
        used = [name for name in DIMENSIONS if sizes[name] > 1 or name == SHARD]
        groups = [_line(numbers, (name,), ranks) for name in used]
        shape = [sizes[name] for name in used]
        mesh = DeviceMesh.from_group(
            groups if len(used) > 1 else groups[0],
            ranks.device.type,
            mesh=numbers.view(*shape),
            mesh_dim_names=tuple(used),
        )
        # On a CPU too these are two groups: threads of their own use them.
        data = replace(
            ranks,
            rank=ranks.rank // parts % (copies * num_shards),
            size=copies * num_shards,
            control=_line(numbers, (COPY, SHARD), ranks, backend="gloo"),
            tensors=_line(numbers, (COPY, SHARD), ranks),
        )
        return cls(all=ranks, data=data, sizes=sizes, mesh=mesh)

    @property
    def stage(self) -> int:
        """Of this rank, from 0."""
        return self.all.rank // (self.all.size // self.sizes[STAGE])

    @property
    def is_speaker(self) -> bool:
        """Whether this rank, of those that hold the same rows, is the one that reports them."""
        return self.stage == 0 and self.all.rank % self.sizes[PART] == 0

    @property
    def speakers(self) -> range:
        """The ranks that report the rows of each data-parallel rank, in their order."""
        return range(0, self.data.size * self.sizes[PART], self.sizes[PART])

    @property
    def part_mesh(self) -> DeviceMesh | None:
        """The ranks that share each matrix with this one; None where there is no other."""
        return self.mesh[PART] if self.sizes[PART] > 1 else None

    @property
    def data_mesh(self) -> DeviceMesh:
        """What a stage's parameters are sharded over, and copied over where there are copies."""
        names = tuple(name for name in (COPY, SHARD) if name in (self.mesh.mesh_dim_names or ()))
        return self.mesh[names] if self.mesh.ndim > len(names) else self.mesh


def _flat_mesh(ranks: Ranks) -> DeviceMesh:
    if ranks.tensors is None:
        return init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=(SHARD,))
    return DeviceMesh.from_group(ranks.tensors, ranks.device.type, mesh_dim_names=(SHARD,))


def _line(
    numbers: torch.Tensor, along: Sequence[str], ranks: Ranks, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return this rank's group of those that differ from it in these dimensions alone. All ranks make all of them."""
    dims = [DIMENSIONS.index(name) for name in along]
    others = [dim for dim in range(len(DIMENSIONS)) if dim not in dims]
    lines = numbers.permute(*others, *dims).flatten(len(others)).flatten(0, len(others) - 1)
    own: dist.ProcessGroup | None = None
    for line in lines.tolist():
        group = dist.new_group(line, timeout=timedelta(seconds=ranks.deadline_s), backend=backend)
        if ranks.rank in line:
            own = group
    assert own is not None
    return own
