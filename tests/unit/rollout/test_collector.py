"""The garbage collector leaves alone what was alive when the node started."""

import gc

from areal_async.rollout.collector import spare_pauses


def test_what_is_alive_at_the_start_is_never_looked_at_again() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # an earlier test may have started a node in this process
    try:
        spare_pauses()

        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() > (700, 10, 10)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
