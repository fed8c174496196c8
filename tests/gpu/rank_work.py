"""What each of two ranks on GPUs does."""

from pathlib import Path
from typing import Any

import anyio
import torch

from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import EngineThread
from tests.unit.trainer.models import engine_of, random_rows


def train_in_the_engines_thread(ranks: Ranks, model: Path, dtype: str) -> dict[str, Any]:
    """Train a step as the trainer does, beside its loop; say on which other devices it has a context."""
    engine = engine_of(model, ranks, dtype=dtype, token_budget=32)
    rows = random_rows(7)[ranks.rank :: 2]
    stats = anyio.run(EngineThread(ranks.device).run, lambda: engine.train_step(rows, step=1, total_steps=1))
    others = range(torch.cuda.device_count() if ranks.device.type == "cuda" else 0)
    return {
        "device": str(ranks.device),
        "grad_norm": stats.grad_norm,
        # A stream alone, made where no memory is taken, makes a context of half a gigabyte there.
        "elsewhere": [index for index in others if index != ranks.device.index and _has_context(index)],
    }


def _has_context(index: int) -> bool:
    return bool(torch._C._cuda_hasPrimaryContext(index))
