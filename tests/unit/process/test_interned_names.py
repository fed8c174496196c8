"""A table of strings that has its size before the first step."""

import subprocess
import sys

_PROBE = """
import sys
import numpy, pyarrow, areal_async.config.settings
from areal_async.process.interned_names import settle_table

def private_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

if "settled" in sys.argv:
    settle_table()
before = private_kb()
for number in range(1_000_000):
    sys.intern(f"a path's name {number}")
print(private_kb() - before)
"""


def test_names_that_come_and_go_take_no_memory() -> None:
    grown_kb = {
        how: int(subprocess.run([sys.executable, "-c", _PROBE, how], check=True, capture_output=True).stdout)
        for how in ("settled", "as it is")
    }
    assert grown_kb["settled"] < 200
    assert grown_kb["as it is"] > 500  # else nothing is guarded here any more
