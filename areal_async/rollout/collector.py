"""The garbage collector in a process that must never pause: thousands of streams on one loop.

A whole collection looks at every object there is. With a tokenizer's libraries and 2,048 streams that takes a
tenth of a second or more, during which no stream and no heartbeat moves; and it finds next to nothing, since what a
stream leaves behind is freed by reference counts.
"""

import gc

THRESHOLDS = (10_000, 10, 100)
"""Net new objects before the young are looked at; such looks before the middle-aged are; and before all are."""


def spare_pauses() -> None:
    """Never look at what is alive now again, and at all the rest rarely. Call once, when everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
