"""What each rank of ``engine/test_gradients.py`` does: it trains rows, and looks at what is left after each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_async.algorithms.objective import LossTerms
from areal_async.config.settings import TrainerSettings
from areal_async.trainer.engine.model import load_critic, load_policy
from areal_async.trainer.engine.parallel.dims import ParallelDims, local_shard
from areal_async.trainer.engine.parallel.division import RowPacker
from areal_async.trainer.engine.parallel.execution import execution_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.flops import decoder_flops
from areal_async.trainer.packing.rows import PackedRow
from tests.unit.trainer.models import random_rows

SPARE_BYTES = 1024
"""Of losses, what a pipeline has said of its rows, and what fills a parameter up that ranks cannot share evenly."""
SETTLING_S = 60


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw of one update."""

    num_rows: int
    num_units: int
    """What FSDP2 reduces at once: layers that train something, and what is around them."""
    shard_bytes: int
    """Of this rank's shards of all trained parameters, in float32."""
    num_parameters: int
    """Trained ones of the whole model; of a pipeline's stage, its own."""
    alive_bytes: list[int] = field(default_factory=list)
    """After each row: of everything that the rows so far have left; in a pipeline, after all."""
    num_scattered: int = 0
    num_shared: int = 0
    """Sums over shards, and over copies."""


class Living(TorchDispatchMode):
    """Knows the memory that was taken while it was entered and is not free yet, and counts sums of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.num_scattered = 0
        self.num_shared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_scattered += "reduce_scatter" in str(func)
        self.num_shared += "allreduce_" in str(func)
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(one.untyped_storage())
                self._storages[reference.cdata] = reference
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes that are alive."""
        self._storages = {key: one for key, one in self._storages.items() if not one.expired()}
        living = [torch.UntypedStorage._new_with_weak_ptr(key) for key in self._storages]
        return sum(one.nbytes() for one in living if one is not None)

    def settled_bytes(self, expected: int) -> int:
        """Bytes that are alive, where more than expected after long enough: gloo's thread lets go a moment late."""
        until = time.monotonic() + SETTLING_S
        while self.num_bytes > expected and time.monotonic() < until:
            time.sleep(0.01)
        return self.num_bytes


def train_in_layouts(ranks: Ranks, model: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, Seen]:
    """Return what this rank sees in each layout, of a critic where it is called so."""
    return {name: _train(ranks, model, name, layout) for name, layout in layouts.items()}


def _train(ranks: Ranks, model: Path, name: str, layout: dict[str, Any]) -> Seen:
    trainer = TrainerSettings.model_validate({"num_ranks": ranks.size, "token_budget": 24, **layout})
    dims = ParallelDims.of(ranks, trainer)
    load = load_critic if name == "critic" else load_policy
    loaded: Any = load(model, dims, trainer, dtype=torch.float32)
    execution = execution_of(loaded, dims)
    flops = decoder_flops(loaded.decoder)
    packer = RowPacker(dims=dims, flops=flops, token_budget=24, fit=execution.fit_rows, num_together=1)
    # The first data-parallel rank has nearly all the sequences: the others go on with empty rows.
    own = random_rows(9) if dims.data.rank == 0 else random_rows(1)
    rows = packer.pack(own, packer.divide(own))
    trained = [one for one in loaded.parameters() if one.requires_grad]
    units = [*loaded.decoder.base_model.layers, loaded] if not hasattr(loaded, "own_stages") else []
    seen = Seen(
        num_rows=len(rows),
        num_units=sum(_trains(unit, units) for unit in units),
        shard_bytes=sum(local_shard(one).nbytes for one in trained),
        num_parameters=sum(one.numel() for one in trained),
    )
    with Living() as living:
        for _ in execution.train(rows, _loss, scale=1.0):
            seen.alive_bytes.append(living.settled_bytes(seen.shard_bytes + SPARE_BYTES))
    return Seen(**vars(seen) | {"num_scattered": living.num_scattered, "num_shared": living.num_shared})


def _trains(unit: Any, units: Sequence[Any]) -> bool:
    """Return whether FSDP2 has gradients of this unit that are not those of one inside it."""
    inside = {id(one) for other in units if other is not units[-1] for one in other.parameters()}
    own = [one for one in unit.parameters() if unit is not units[-1] or id(one) not in inside]
    return any(one.requires_grad for one in own)


def _loss(_number: int, row: PackedRow, outputs: Any) -> LossTerms:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return LossTerms(loss=torch.stack([(one * row.mask_S).square().sum() for one in parts]).sum(), sums={}, maxima={})
