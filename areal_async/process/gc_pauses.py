"""When Python's garbage collector looks: not while modules are imported, and rarely where nothing may pause.

A whole collection looks at every object there is, and finds next to nothing: what a stream or an import leaves behind
is freed by reference counts.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 10, 100)
"""Net new objects before the young are looked at; such looks before the middle-aged are; and before all are."""


@contextmanager
def importing() -> Iterator[None]:
    """Import without looking, and never look again at what was imported.

    To import torch and a model of transformers takes 2.2 s of a processor instead of 2.9; each whole collection later
    takes 0.4 s less. Where all is imported already nothing is set aside: each call would keep what is garbage then.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
            # what is set aside is not taken apart at the end, and libraries of nanobind tell of each object left
            atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


def spare_pauses() -> None:
    """Never look at what is alive now again, and at all the rest rarely. Call once, when everything is imported.

    For a process that must never pause: with a tokenizer's libraries and 2,048 streams a whole collection takes a tenth
    of a second or more, during which no stream and no heartbeat moves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
