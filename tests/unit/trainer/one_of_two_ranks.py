"""What one of two ranks does in ``test_distributed.py``; prints what it saw as JSON, on its last line."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from areal_async.trainer.distributed import join_ranks
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.one_of_two_senders import send_together


def main(model: Path, directory: Path) -> None:
    """Speak to the other rank, then train beside it: each with rows, then all rows on one; last, broadcast."""
    ranks = join_ranks(deadline_s=120.0)
    is_first = ranks.rank == 0
    words = {
        "broadcast": ranks.broadcast_bytes(b"\x00from the first\xff" if is_first else None).hex(),
        "empty": ranks.broadcast_bytes(b"" if is_first else None).hex(),
        "gather": [part.hex() for part in ranks.gather_bytes(b"" if is_first else b"abc")],
        "all_true": ranks.all_agree(True),
        "one_false": ranks.all_agree(is_first),
    }
    engine = engine_of(model, ranks)
    rows = random_rows(7)
    stats = [
        engine.train_step(rows[:5] if is_first else rows[5:], step=1, total_steps=2),
        engine.train_step([] if is_first else rows, step=2, total_steps=2),
    ]
    engine.save_checkpoint(directory / "checkpoint", b"ledger")
    hashes = engine.save_weights(directory / "weights")
    logprobs = engine.logprobs(rows[:1] if is_first else [])
    words |= {"stats": [asdict(one) for one in stats], "hashes": hashes, "num_logprobs": len(logprobs)}
    words["ledger"] = engine.load_checkpoint(directory / "checkpoint").decode()
    send_together(model, directory, ranks)
    ranks.close()
    sys.stdout.write(json.dumps(words))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
