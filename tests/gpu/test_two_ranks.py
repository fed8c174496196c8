"""Two ranks train beside their loops, each on its own device and on no other."""

import math
from pathlib import Path

from areal_async.process.host import visible_gpus
from tests.gpu.machine import DEVICE, report
from tests.gpu.rank_work import train_in_the_engines_thread
from tests.unit.trainer.models import save_model
from tests.unit.trainer.rank_workers import RankWorkers


def test_two_ranks_train_away_from_device_0(two_ranks: RankWorkers, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")

    seen = two_ranks.run(train_in_the_engines_thread, model, "bfloat16")

    assert math.isfinite(seen[0]["grad_norm"])
    assert seen[0]["grad_norm"] == seen[1]["grad_norm"]
    for one in seen:
        assert one["elsewhere"] == [], one
    if DEVICE == "cuda":
        last = len(visible_gpus()) - 1
        assert [one["device"] for one in seen] == [f"cuda:{last - 1}", f"cuda:{last}"]
    report("two ranks on " + " and ".join(one["device"] for one in seen))
