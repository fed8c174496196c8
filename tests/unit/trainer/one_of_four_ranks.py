"""What each of four ranks does in ``test_layouts.py``."""

from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import TrainRow
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.trained_steps import TrainedSteps

LAYOUTS = {
    "tensor_parallel": 2,
    "critic": {"tensor_parallel": 1, "lr": 1e-2},
    "reference": {"tensor_parallel": 1, "replicas": 2},
}
"""The policy's rows are on two data-parallel ranks, those of the critic and of the reference on four."""


def train_and_count(ranks: Ranks, model: Path, algorithm: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train in three layouts at once, write a checkpoint, read another one, and look at collectives."""
    runner = TrainedSteps(model, ranks, trainer={"num_ranks": 4, **LAYOUTS}, **algorithm)
    stats = runner.train_shares(is_first=runner.engines.actor.dims.data.rank == 0)
    runner.engines.save_checkpoint(directory / "of_four", b"of four")
    trained = runner.fingerprint()
    ledger = runner.engines.load_checkpoint(directory / "of_one").decode()
    return {
        "stats": stats,
        "fingerprint": trained,
        "ledger": ledger,
        "loaded": runner.fingerprint(),
        "exact": _reduce(model, ranks, random_rows(6), reduce_dtype="float32"),
        "compressed": _reduce(model, ranks, random_rows(6), reduce_dtype="bfloat16"),
    }


def _reduce(model: Path, ranks: Ranks, rows: list[TrainRow], *, reduce_dtype: str) -> dict[str, Any]:
    """Return in what gradients cross the ranks in an update of these rows, and the norm that they have then."""
    engine = engine_of(model, ranks, token_budget=24, reduce_dtype=reduce_dtype)
    with Reductions() as reductions:
        stats = engine.train_step(rows, step=1, total_steps=1)
    return {"dtypes": reductions.dtypes, "grad_norm": stats.grad_norm}


class Reductions(TorchDispatchMode):
    """Sees the collectives that add gradients up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()
        """What they added up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in str(func):
            self.dtypes.add(str(args[0].dtype))
        return func(*args, **(kwargs or {}))
