"""What the two ranks of ``one_of_two_ranks`` broadcast: rank 0 says where to join, both gather what it sends."""

from pathlib import Path

import msgspec

from areal_async.inference.weight_group import GLOO
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.broadcast import Broadcaster
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.receivers import DEADLINE_S, state_of


def send_together(model: Path, directory: Path, ranks: Ranks) -> None:
    """Train a step, so that the weights are this trainer's own; broadcast them; save them to compare."""
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
    if send is not None:
        assert broadcaster.has_group, "the broadcast was to arrive"
        broadcaster.close()
    engine.save_weights(directory / "sent")
