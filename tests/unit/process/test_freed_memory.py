"""Blocks that were freed between others are not resident any more."""

import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
from areal_async.process.freed_memory import give_back_blocks, give_back_freed

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) >> 10

if {how!r} == "at once":
    give_back_blocks()
del_first = np.ones(31 << 20, dtype=np.uint8)
del del_first  # from here on glibc would keep what is smaller
before = resident_mb()
blocks, between = [], []
for _ in range(64):
    blocks.append(np.ones(2 << 20, dtype=np.uint8))
    between.append(np.ones(64 << 10, dtype=np.uint8))
blocks.clear()
if {how!r} == "later":
    give_back_freed()
print(resident_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_what_is_freed_between_blocks_that_live_on_is_not_resident() -> None:
    kept, at_once, later = (
        int(subprocess.run([sys.executable, "-c", PROGRAM.format(how=how)], capture_output=True, text=True,
                           check=True).stdout)
        for how in ("never", "at once", "later")
    )  # fmt: skip

    assert kept > 100, "the test shows nothing here"
    assert at_once < 20
    assert later < 20
