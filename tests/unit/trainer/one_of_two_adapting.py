"""What each of two ranks that train adapters does in ``test_lora.py``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.models import engine_of, random_rows

LORA = {"rank": 4, "alpha": 8.0}


def train_adapters(ranks: Ranks, model: Path, directory: Path) -> list[dict[str, Any]]:
    """Train beside the other rank, then leave a checkpoint and what is exported; return the statistics."""
    engine = engine_of(model, ranks, lora=LORA)
    rows = random_rows(7)
    mine = [rows[:5], []] if ranks.rank == 0 else [rows[5:], rows]
    stats = [engine.train_step(part, step=step, total_steps=2) for step, part in enumerate(mine, start=1)]
    Engines(actor=engine).save_checkpoint(directory / "checkpoint", b"ledger")
    engine.export(directory)
    return [asdict(one) for one in stats]
