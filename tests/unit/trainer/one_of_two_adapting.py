"""What one of two ranks that train adapters does in ``test_lora.py``; prints its statistics as JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from areal_async.trainer.engine.parallel.ranks import join_ranks
from tests.unit.trainer.models import engine_of, random_rows

LORA = {"rank": 4, "alpha": 8.0}


def main(model: Path, directory: Path) -> None:
    """Train beside the other rank, then leave a checkpoint and what is exported."""
    ranks = join_ranks(deadline_s=120.0)
    engine = engine_of(model, ranks, lora=LORA)
    rows = random_rows(7)
    mine = [rows[:5], []] if ranks.rank == 0 else [rows[5:], rows]
    stats = [engine.train_step(part, step=step, total_steps=2) for step, part in enumerate(mine, start=1)]
    engine.save_checkpoint(directory / "checkpoint", b"ledger")
    engine.export(directory)
    ranks.close()
    sys.stdout.write("\n" + json.dumps([asdict(one) for one in stats]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
