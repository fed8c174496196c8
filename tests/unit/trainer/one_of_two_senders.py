"""What one of two ranks does in ``test_broadcast.py``: rank 0 says where to join, both gather what it broadcasts."""

import sys
from pathlib import Path

import msgspec

from areal_async.trainer.broadcast import Broadcaster
from areal_async.trainer.distributed import join_ranks
from areal_async.weight_group import GLOO
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.receivers import DEADLINE_S, state_of


def main(model: Path, directory: Path) -> None:
    """Train a step, so that the weights are this trainer's own; broadcast them; save them to compare."""
    ranks = join_ranks(deadline_s=40.0)
    engine = engine_of(model, ranks, dtype="bfloat16")
    engine.train_step(random_rows(4), step=1, total_steps=1)
    buckets = engine.plan_buckets(max_bytes=5_000)
    send = None
    if ranks.rank == 0:
        broadcaster = Broadcaster(prefix="test-1", address="127.0.0.1", backend=GLOO, deadline_s=DEADLINE_S)
        group = broadcaster.open([(state_of("0-0"), 1)])
        (directory / "buckets.json").write_bytes(msgspec.json.encode(buckets))
        (directory / "announced.tmp").write_bytes(msgspec.json.encode(group))
        (directory / "announced.tmp").rename(directory / "announced.json")
        send = broadcaster.send
    engine.gather_weights(buckets, send=send)
    assert send is None or broadcaster.has_group, "the broadcast was to arrive"
    engine.save_weights(directory / "weights")
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
