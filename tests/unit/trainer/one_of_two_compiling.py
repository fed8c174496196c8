"""What each of two ranks does in ``engine/test_compiled.py``: it trains with compiled layers, sharded and in stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from areal_async.trainer.engine import compiled
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.trained_steps import TrainedSteps

WITH_REFERENCE = {"kl_coef": 0.1}


def num_graphs() -> int:
    """Return how many graphs this process has traced since its counters were cleared."""
    return int(counters["stats"]["unique_graphs"])


def train_compiled(ranks: Ranks, model: Path) -> dict[str, Any]:
    """Train a policy beside a frozen reference, then one in two stages; return what was seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", "eager")
        torch._dynamo.reset()
        trainer = {"compile": True, "activation_checkpointing": True}
        together = TrainedSteps(model, ranks, trainer=trainer, **WITH_REFERENCE)
        counters.clear()  # of the look at the compiler
        stats = together.train_shares(is_first=ranks.rank == 0)
        seen = {"stats": stats, "fingerprint": together.fingerprint(), "num_graphs": num_graphs()}
        return seen | {"stages": train_three_steps(engine_of(model, ranks, compile=True, pipeline_parallel=2))}


def train_three_steps(engine: FsdpEngine) -> list[tuple[float, float]]:
    """Return the loss and the norm of gradients of each."""
    stats = [engine.train_step(random_rows(4 + step, seed=step), step=step, total_steps=3) for step in (1, 2, 3)]
    return [(one.loss, one.grad_norm) for one in stats]
