"""What one of four ranks does in ``test_layouts.py``; prints what it saw as JSON, on its last line."""

import json
import sys
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from areal_async.trainer.engine.parallel.ranks import Ranks, join_ranks
from areal_async.trainer.packing.rows import TrainRow
from tests.unit.trainer.learners import Learners, batch_rows
from tests.unit.trainer.models import engine_of, random_rows

LAYOUTS = {
    "tensor_parallel": 2,
    "critic": {"tensor_parallel": 1, "lr": 1e-2},
    "reference": {"tensor_parallel": 1, "replicas": 2},
}
"""The policy's rows are on two data-parallel ranks, those of the critic and of the reference on four."""


def main(model: Path, algorithm: dict[str, Any], directory: Path) -> None:
    """Train in three layouts at once, write a checkpoint, read another one, and look at collectives."""
    ranks = join_ranks(deadline_s=200.0)
    learners = Learners(model, ranks, trainer={"num_ranks": 4, **LAYOUTS}, **algorithm)
    rows, is_first = batch_rows(), learners.engines.actor.dims.data.rank == 0
    mine = [rows[:5] if is_first else rows[5:], [] if is_first else rows, rows[:1] if is_first else rows[1:]]
    stats = [learners.train(part, step=step) for step, part in enumerate(mine, start=1)]
    learners.engines.save_checkpoint(directory / "of_four", b"of four")
    trained = learners.fingerprint()
    ledger = learners.engines.load_checkpoint(directory / "of_one").decode()
    words = {"stats": stats, "fingerprint": trained, "ledger": ledger, "loaded": learners.fingerprint()}
    words["exact"] = [_reduce(model, ranks, random_rows(count), reduce_dtype="float32") for count in (1, 6)]
    words["compressed"] = _reduce(model, ranks, random_rows(6), reduce_dtype="bfloat16")
    sys.stdout.write("\n" + json.dumps(words))
    sys.stdout.flush()
    ranks.close()


def _reduce(model: Path, ranks: Ranks, rows: list[TrainRow], *, reduce_dtype: str) -> dict[str, Any]:
    """Return in what gradients cross the ranks in an update of these rows, and the norm that they have then."""
    engine = engine_of(model, ranks, token_budget=24, reduce_dtype=reduce_dtype)
    with Reductions() as reductions:
        stats = engine.train_step(rows, step=1, total_steps=1)
    return {"dtypes": reductions.dtypes, "grad_norm": stats.grad_norm}


class Reductions(TorchDispatchMode):
    """Counts the collectives that add gradients up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []
        """What each of them added up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in str(func):
            self.dtypes.append(str(args[0].dtype))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
